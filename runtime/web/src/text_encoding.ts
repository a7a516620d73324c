/** UTF-8 for Protocol Buffers, which assume the platform's. Imported before all wire code. */

import { configureTextEncoding } from "@bufbuild/protobuf/wire";

import { decodeUtf8, encodeUtf8 } from "./utf8.js";

configureTextEncoding({
  encodeUtf8: (text) => encodeUtf8(text) as Uint8Array<ArrayBuffer>,
  decodeUtf8,
  checkUtf8: (text) => !/\p{Surrogate}/u.test(text),
});
