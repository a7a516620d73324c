/** The files of the vectors, in Node; `engines/vector_files.ts` has them where there are no files. */

import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";

const FOLDER = new URL("../../../../tests/vectors/data/", import.meta.url);

/** Return a file's text. */
export function textOf(name: string): string {
  return readFileSync(new URL(name, FOLDER), "utf-8");
}

/** Return the text of a compressed file. */
export function unpacked(name: string): string {
  return gunzipSync(readFileSync(new URL(name, FOLDER))).toString("utf-8");
}
