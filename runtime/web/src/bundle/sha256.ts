/** SHA-256 (FIPS 180-4), by the platform if possible. Pages of plain `http://` addresses have none, so it is computed here. */

interface Digester {
  digest(algorithm: "SHA-256", data: Uint8Array): Promise<ArrayBuffer>;
}

/** Return the digest of bytes, in hexadecimal. */
export async function sha256(bytes: Uint8Array): Promise<string> {
  const { subtle } = (globalThis as { crypto?: { subtle?: Digester } }).crypto ?? {};
  return hexadecimal(subtle ? new Uint8Array(await subtle.digest("SHA-256", bytes)) : computed(bytes));
}

/** Compute the digest without the platform. 100 MB take about a second. */
export function computed(bytes: Uint8Array): Uint8Array {
  const state = Int32Array.from(ROOTS.slice(0, 8), ([, square]) => square);
  const words = new Int32Array(64);
  const whole = bytes.length - (bytes.length % BLOCK);
  const view = new DataView(bytes.buffer, bytes.byteOffset, whole);
  for (let at = 0; at < whole; at += BLOCK) mix(state, words, view, at);
  const end = padded(bytes.subarray(whole), bytes.length);
  for (let at = 0; at < end.byteLength; at += BLOCK) mix(state, words, end, at);
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, at) => digest.setInt32(4 * at, word));
  return new Uint8Array(digest.buffer);
}

const BLOCK = 64;
const ROOTS = roots(64);
const CONSTANTS = Int32Array.from(ROOTS, ([cube]) => cube);

/** Return the first 32 bits of the fractional parts of the cube and square roots of the first primes. */
function roots(count: number): [number, number][] {
  const primes: number[] = [];
  for (let number = 2; primes.length < count; number++) {
    if (primes.every((prime) => number % prime)) primes.push(number);
  }
  const fraction = (root: number): number => ((root - Math.floor(root)) * 2 ** 32) | 0;
  return primes.map((prime) => [fraction(Math.cbrt(prime)), fraction(Math.sqrt(prime))]);
}

/** Return the last blocks: the rest of the text, a bit, zeros, and the length in bits. */
function padded(rest: Uint8Array, length: number): DataView {
  const blocks = new Uint8Array(rest.length < BLOCK - 8 ? BLOCK : 2 * BLOCK);
  blocks.set(rest);
  blocks[rest.length] = 0x80;
  const view = new DataView(blocks.buffer);
  view.setUint32(blocks.length - 8, Math.floor(length / 2 ** 29));
  view.setUint32(blocks.length - 4, (8 * length) >>> 0);
  return view;
}

function mix(state: Int32Array, words: Int32Array, block: DataView, start: number): void {
  for (let at = 0; at < 16; at++) words[at] = block.getInt32(start + 4 * at);
  for (let at = 16; at < 64; at++) {
    const early = words[at - 15]!;
    const late = words[at - 2]!;
    const s0 = turned(early, 7) ^ turned(early, 18) ^ (early >>> 3);
    const s1 = turned(late, 17) ^ turned(late, 19) ^ (late >>> 10);
    words[at] = words[at - 16]! + s0 + words[at - 7]! + s1;
  }
  let [a, b, c, d, e, f, g, h] = state as unknown as [number, number, number, number, number, number, number, number];
  for (let at = 0; at < 64; at++) {
    const s1 = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25);
    const first = (h + s1 + ((e & f) ^ (~e & g)) + CONSTANTS[at]! + words[at]!) | 0;
    const s0 = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
    const second = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    h = g;
    g = f;
    f = e;
    e = (d + first) | 0;
    d = c;
    c = b;
    b = a;
    a = (first + second) | 0;
  }
  [a, b, c, d, e, f, g, h].forEach((word, at) => (state[at]! += word));
}

function turned(word: number, bits: number): number {
  return (word >>> bits) | (word << (32 - bits));
}

function hexadecimal(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
