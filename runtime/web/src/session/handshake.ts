/** What both ends must agree on before a conversation starts. */

export const PROTOCOL_VERSION = 2;

/** For whom tokens and memory rows are. `drafter` is empty for a client that drafts without memory rows. */
export interface Fingerprints {
  readonly target: string;
  readonly tokenizer: string;
  readonly drafter: string;
}

/** What a verifier allows. */
export interface Limits {
  /** Tokens. */
  readonly maxContext: number;
  readonly maxDraftTokens: number;
  /** Bytes. */
  readonly maxFrameBytes: number;
  /** Silence after which it closes a connection. */
  readonly idleSeconds: number;
  /** Whether it verifies trees, or chains only. */
  readonly trees: boolean;
  /** How long it writes an answer on while its client is away; 0 for not at all. */
  readonly awaySeconds: number;
  /** How long it keeps a conversation without a connection. */
  readonly keepSeconds: number;
}

/** Until a verifier has said its own. */
export const USUAL_LIMITS: Limits = {
  maxContext: 8192,
  maxDraftTokens: 1024,
  maxFrameBytes: 1 << 20,
  idleSeconds: 900,
  trees: true,
  awaySeconds: 0,
  keepSeconds: 0,
};

/** CRC-32 (IEEE 802.3) of token ids, each as four bytes, little end first: `digest([1, 2])` is 58791804. */
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
