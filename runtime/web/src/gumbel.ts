/**
 * Gumbel noise as a function of seed, position and token id. The target chooses the token with the largest
 * `logit / temperature + noise`, so a drafter that knows the seed can guess with the same noise. `docs/protocol.md` defines
 * it.
 */

type Words = [number, number, number, number];

const PARITY = 0x1bd11bda;
const ROTATIONS = [
  [10, 26],
  [11, 21],
  [13, 27],
  [23, 5],
  [6, 20],
  [17, 11],
  [25, 10],
  [18, 20],
] as const;
const ROUNDS = 20;

/**
 * Return the noise of a token at the absolute `position`, with the Gumbel distribution.
 *
 * @param seed of 64 bits.
 * @param position below 2^53.
 * @param token from 0 to 2^34 - 1.
 */
export function gumbel(seed: bigint, position: number, token: number): number {
  const key: Words = [Number(seed & 0xffffffffn), Number((seed >> 32n) & 0xffffffffn), 0, 0];
  const counter: Words = [Math.floor(token / 4), position % 2 ** 32, Math.floor(position / 2 ** 32), 0];
  const word = threefry(counter, key)[token % 4]!;
  return -Math.log(-Math.log((word + 0.5) * 2 ** -32));
}

/** Threefry4x32 of 20 rounds (Salmon et al. 2011): additions, rotations and exclusive ors of 32 bits. */
function threefry(counter: Words, key: Words): Words {
  const keys = [...key, PARITY ^ key[0] ^ key[1] ^ key[2] ^ key[3]];
  let [a, b, c, d] = counter.map((word, at) => (word + keys[at]!) | 0) as Words;
  for (let round = 0; round < ROUNDS; round++) {
    const [left, right] = ROTATIONS[round % 8]!;
    a = (a + b) | 0;
    c = (c + d) | 0;
    // The second and fourth words are swapped: the other two rounds of the paper's pair.
    [b, d] = [rotated(d, right) ^ c, rotated(b, left) ^ a];
    if (round % 4 === 3) {
      const number = (round + 1) / 4;
      a = (a + keys[number % 5]!) | 0;
      b = (b + keys[(number + 1) % 5]!) | 0;
      c = (c + keys[(number + 2) % 5]!) | 0;
      d = (d + keys[(number + 3) % 5]! + number) | 0;
    }
  }
  return [a >>> 0, b >>> 0, c >>> 0, d >>> 0];
}

function rotated(word: number, by: number): number {
  return (word << by) | (word >>> (32 - by));
}
