/** UTF-8 for Protocol Buffers, which assume the platform's. Imported before all wire code. */

import { configureTextEncoding } from "@bufbuild/protobuf/wire";

import { decodeUtf8, encodeUtf8 } from "./utf8.js";

configureTextEncoding({
  encodeUtf8: (text) => encodeUtf8(text) as Uint8Array<ArrayBuffer>,
  decodeUtf8: (bytes, strict) => {
    const text = decodeUtf8(bytes);
    if (strict && text.includes("\ufffd") && !isEqual(encodeUtf8(text), bytes)) throw new TypeError("a text is no UTF-8");
    return text;
  },
  checkUtf8: (text) => !/\p{Surrogate}/u.test(text),
});

function isEqual(one: Uint8Array, other: Uint8Array): boolean {
  return one.length === other.length && one.every((byte, at) => byte === other[at]);
}
