/** Bytes as the characters that byte-level vocabularies write for them. */

import { decodeUtf8, encodeUtf8 } from "../utf8.js";

/** The character of each byte: itself where it can be seen, else one from 256 on. */
const CHARACTERS: readonly string[] = (() => {
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => {
    const seen = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    return String.fromCharCode(seen ? byte : next++);
  });
})();
const BYTES: ReadonlyMap<string, number> = new Map(CHARACTERS.map((character, byte) => [character, byte]));

/** The UTF-8 bytes of a text, one character for each. */
export function spelled(text: string): string {
  return Array.from(encodeUtf8(text), (byte) => CHARACTERS[byte]!).join("");
}

/** The text of such pieces; bytes that are no UTF-8 become replacement characters. A piece that is none stays as it is. */
export function unspelled(pieces: readonly string[]): string {
  const bytes: number[] = [];
  for (const piece of pieces) {
    const found = Array.from(piece, (character) => BYTES.get(character));
    const known = found.every((byte) => byte !== undefined);
    for (const byte of known ? found : encodeUtf8(piece)) bytes.push(byte!);
  }
  return decodeUtf8(Uint8Array.from(bytes));
}
