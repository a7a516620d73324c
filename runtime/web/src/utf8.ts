/** UTF-8, by the platform if it has it: JavaScriptCore and QuickJS alone have not. */

interface Platform {
  readonly TextEncoder?: new () => { encode(text: string): Uint8Array };
  readonly TextDecoder?: new (label: string, options: object) => { decode(bytes: Uint8Array): string };
}

const { TextDecoder, TextEncoder } = globalThis as Platform;
const REPLACEMENT = 0xfffd;
const MOST_ARGUMENTS = 4096; // of a call

/** Return the bytes of a text; halves of a character become replacement characters. */
export const encodeUtf8 = TextEncoder ? encoderOf(new TextEncoder()) : encoded;

/** Return the text of bytes; invalid UTF-8 becomes replacement characters. */
export const decodeUtf8 = TextDecoder ? decoderOf(new TextDecoder("utf-8", { ignoreBOM: true })) : decoded;

function encoderOf(encoder: { encode(text: string): Uint8Array }): (text: string) => Uint8Array {
  return (text) => encoder.encode(text);
}

function decoderOf(decoder: { decode(bytes: Uint8Array): string }): (bytes: Uint8Array) => string {
  return (bytes) => decoder.decode(bytes);
}

/** Encode without the platform. */
export function encoded(text: string): Uint8Array {
  const bytes = new Uint8Array(3 * text.length);
  let length = 0;
  for (let at = 0; at < text.length; at++) {
    let code = text.codePointAt(at)!;
    if (code > 0xffff) at++;
    else if (code >= 0xd800 && code <= 0xdfff) code = REPLACEMENT;
    if (code < 0x80) {
      bytes[length++] = code;
      continue;
    }
    const followers = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    bytes[length++] = ((0xff00 >> (followers + 1)) & 0xff) | (code >> (6 * followers));
    for (let left = followers - 1; left >= 0; left--) bytes[length++] = 0x80 | ((code >> (6 * left)) & 0x3f);
  }
  return bytes.slice(0, length);
}

/** Decode without the platform. As in the WHATWG's standard, the longest beginning of a character becomes one replacement. */
export function decoded(bytes: Uint8Array): string {
  const parts: string[] = [];
  let codes: number[] = [];
  for (let at = 0; at < bytes.length; ) {
    const first = bytes[at++]!;
    let code = first;
    if (first >= 0x80) {
      const followers = first >= 0xc2 && first < 0xe0 ? 1 : first >= 0xe0 && first < 0xf0 ? 2 : first >= 0xf0 && first < 0xf5 ? 3 : 0;
      code = followers ? first & (0x3f >> followers) : REPLACEMENT;
      // No character has a longer form than necessary, is half of another, or lies above U+10FFFF.
      let [least, most] = [first === 0xe0 ? 0xa0 : first === 0xf0 ? 0x90 : 0x80, first === 0xed ? 0x9f : first === 0xf4 ? 0x8f : 0xbf];
      for (let left = followers; left > 0; left--) {
        const next = bytes[at];
        if (next === undefined || next < least || next > most) {
          code = REPLACEMENT;
          break;
        }
        code = (code << 6) | (next & 0x3f);
        [least, most] = [0x80, 0xbf];
        at++;
      }
    }
    codes.push(code);
    if (codes.length === MOST_ARGUMENTS) {
      parts.push(String.fromCodePoint(...codes));
      codes = [];
    }
  }
  return parts.join("") + String.fromCodePoint(...codes);
}
