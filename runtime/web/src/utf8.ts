/** UTF-8. */

// Browsers and Node have both; the sources are compiled without the types of either.
declare const TextEncoder: new () => { encode(text: string): Uint8Array };
declare const TextDecoder: new (label: string, options: object) => { decode(bytes: Uint8Array): string };

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Return the bytes of a text. */
export function encodeUtf8(text: string): Uint8Array {
  return encoder.encode(text);
}

/** Return the text of bytes; invalid UTF-8 becomes replacement characters. */
export function decodeUtf8(bytes: Uint8Array): string {
  return decoder.decode(bytes);
}
