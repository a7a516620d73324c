/** Hello and Welcome: what both ends have to agree on before a conversation starts. */

export const PROTOCOL_VERSION = 2;

/** Fingerprints of the models of a bundle. `drafter` is empty if the client drafts without memory rows. */
export interface Fingerprints {
  readonly target: string;
  readonly tokenizer: string;
  readonly drafter: string;
}

/** Limits of a verifier, as in its Welcome. */
export interface Limits {
  /** Context of the target, tokens. */
  readonly maxContext: number;
  /** Largest draft, tokens. */
  readonly maxDraftTokens: number;
  /** Largest frame, bytes. */
  readonly maxFrameBytes: number;
  /** A connection is closed after this silence, seconds. */
  readonly idleSeconds: number;
  /** Whether draft trees are verified; else only chains. */
  readonly trees: boolean;
  /** How long an answer is continued after its client disconnected, seconds; 0 if it is not. */
  readonly awaySeconds: number;
  /** How long a conversation is kept after its client disconnected, seconds. */
  readonly keepSeconds: number;
}

/** Limits assumed before the first Welcome. */
export const USUAL_LIMITS: Limits = {
  maxContext: 8192,
  maxDraftTokens: 1024,
  maxFrameBytes: 1 << 20,
  idleSeconds: 900,
  trees: true,
  awaySeconds: 0,
  keepSeconds: 0,
};

/** Return the CRC-32 (IEEE 802.3) of token ids, each as four bytes, little-endian: `digest([1, 2])` is 58791804. */
export function digest(tokens: Iterable<number>): number {
  let crc = -1;
  for (const token of tokens) {
    for (let shift = 0; shift < 32; shift += 8) {
      crc = CRC_TABLE[(crc ^ (token >>> shift)) & 0xff]! ^ (crc >>> 8);
    }
  }
  return ~crc >>> 0;
}

const CRC_TABLE = Int32Array.from({ length: 256 }, (_, byte) => {
  let crc = byte;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  return crc;
});
