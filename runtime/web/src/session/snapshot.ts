/** Snapshots of a client session as JSON: saved by one process, restored by the next. */

import { MoaError } from "../errors.js";
import { ORIGINS, POLICIES, type Origin, type Policy } from "./events.js";
import type { Fingerprints, Limits } from "./handshake.js";
import { GRAMMAR_KINDS, type Grammar, type Sampling } from "./sampling.js";

export const SNAPSHOT_VERSION = 3;

/** The keys are those of the Python runtime. Integers above 2^53 - 1 are strings. */
export type SnapshotJson = { [key: string]: Json };

/** The state of a session that outlives its process. */
export interface Snapshot {
  readonly policy: Policy;
  readonly limits: Limits;
  readonly resumeToken: string;
  readonly epoch: bigint;
  readonly connection: bigint;
  readonly committed: number[];
  readonly supplied: number[];
  readonly kept: number;
  readonly tentative: number[];
  readonly origins: Origin[];
  readonly answering: boolean;
  readonly answerStart: number | null;
  readonly sampling: Sampling;
  readonly maxLength: number;
  readonly whileAway: boolean;
}

/** Return JSON values, with the version and the fingerprints of the bundle. */
export function snapshotToJson(snapshot: Snapshot, fingerprints: Fingerprints): SnapshotJson {
  const { limits } = snapshot;
  return {
    version: SNAPSHOT_VERSION,
    fingerprints: { ...fingerprints },
    policy: snapshot.policy,
    limits: {
      max_context: limits.maxContext,
      max_draft_tokens: limits.maxDraftTokens,
      max_frame_bytes: limits.maxFrameBytes,
      idle_seconds: limits.idleSeconds,
      trees: limits.trees,
      away_seconds: limits.awaySeconds,
      keep_seconds: limits.keepSeconds,
    },
    resume_token: snapshot.resumeToken,
    epoch: wholeToJson(snapshot.epoch),
    connection: wholeToJson(snapshot.connection),
    committed: snapshot.committed,
    supplied: snapshot.supplied,
    kept: snapshot.kept,
    tentative: snapshot.tentative,
    origins: snapshot.origins,
    answering: snapshot.answering,
    answer_start: snapshot.answerStart,
    sampling: samplingToJson(snapshot.sampling),
    max_length: snapshot.maxLength,
    while_away: snapshot.whileAway,
  };
}

/**
 * Read a snapshot.
 *
 * @throws SnapshotError if a value is missing or invalid, or the version, target or tokenizer differs.
 */
export function snapshotFromJson(data: unknown, fingerprints: Fingerprints, vocabSize: number): Snapshot {
  const top = new JsonReader(data, "a snapshot");
  const version = top.whole("version", UINT64);
  if (version !== BigInt(SNAPSHOT_VERSION)) {
    throw new SnapshotError(
      `the snapshot has version ${version}, this program reads version ${SNAPSHOT_VERSION}: restore it with the version ` +
        "of moa-edge that made it, or begin a new conversation",
    );
  }
  const madeFor = top.inner("fingerprints");
  for (const name of ["target", "tokenizer"] as const) {
    const theirs = madeFor.text(name);
    if (theirs !== fingerprints[name]) {
      throw new SnapshotError(
        `the snapshot was made with ${name} ${shown(theirs)}, this bundle is for ${shown(fingerprints[name])}: ` +
          "restore it with the bundle that it was made with, or begin a new conversation",
      );
    }
  }
  const snapshot: Snapshot = {
    policy: top.choice("policy", POLICIES),
    limits: limitsFrom(top.inner("limits")),
    resumeToken: top.text("resume_token"),
    epoch: top.whole("epoch", UINT64 / 2n), // the session counts on from it
    connection: top.whole("connection", UINT64 / 2n),
    committed: top.tokens("committed", vocabSize),
    supplied: top.tokens("supplied", vocabSize),
    kept: top.number("kept"),
    tentative: top.tokens("tentative", vocabSize),
    origins: top.choices("origins", ORIGINS),
    answering: top.flag("answering"),
    answerStart: top.get("answer_start") === null ? null : top.number("answer_start"),
    sampling: samplingFrom(top.inner("sampling")),
    maxLength: Number(top.whole("max_length", UINT64)),
    whileAway: top.flag("while_away"),
  };
  check(snapshot);
  return snapshot;
}

function limitsFrom(limits: JsonReader): Limits {
  return {
    maxContext: limits.number("max_context"),
    maxDraftTokens: limits.number("max_draft_tokens"),
    maxFrameBytes: limits.number("max_frame_bytes"),
    idleSeconds: limits.number("idle_seconds"),
    trees: limits.flag("trees"),
    awaySeconds: limits.number("away_seconds"),
    keepSeconds: limits.number("keep_seconds"),
  };
}

/** Return JSON values; those of penalties, `logitBias` and `minTokens` only if they change something. */
export function samplingToJson(sampling: Sampling): SnapshotJson {
  const { minP, seed, temperature, topK, topP } = sampling;
  const { frequencyPenalty = 0, logitBias = [], minTokens = 0, presencePenalty = 0, repetitionPenalty = 1 } = sampling;
  return {
    temperature,
    top_p: topP,
    seed: wholeToJson(seed),
    top_k: topK,
    min_p: minP,
    ...(presencePenalty ? { presence_penalty: presencePenalty } : {}),
    ...(frequencyPenalty ? { frequency_penalty: frequencyPenalty } : {}),
    ...(repetitionPenalty === 1 ? {} : { repetition_penalty: repetitionPenalty }),
    ...(logitBias.length ? { logit_bias: logitBias.map((pair) => [...pair]) } : {}),
    ...(minTokens ? { min_tokens: minTokens } : {}),
    ...(sampling.grammar ? { grammar: { ...sampling.grammar } } : {}),
  };
}

/** Read the values of {@link samplingToJson}. */
export function samplingFrom(sampling: JsonReader): Sampling {
  return {
    temperature: sampling.real("temperature"),
    topP: sampling.real("top_p"),
    seed: sampling.whole("seed", UINT64),
    topK: Number(sampling.whole("top_k", UINT32)),
    minP: sampling.real("min_p"),
    ...(sampling.has("presence_penalty") ? { presencePenalty: sampling.real("presence_penalty", -2, 2) } : {}),
    ...(sampling.has("frequency_penalty") ? { frequencyPenalty: sampling.real("frequency_penalty", -2, 2) } : {}),
    ...(sampling.has("repetition_penalty") ? { repetitionPenalty: sampling.real("repetition_penalty", 0, 10) } : {}),
    ...(sampling.has("logit_bias") ? { logitBias: sampling.biases("logit_bias") } : {}),
    ...(sampling.has("min_tokens") ? { minTokens: sampling.number("min_tokens") } : {}),
    ...(sampling.has("grammar") ? { grammar: grammarFrom(sampling.inner("grammar")) } : {}),
  };
}

function grammarFrom(grammar: JsonReader): Grammar {
  return { kind: grammar.choice("kind", GRAMMAR_KINDS), text: grammar.text("text") };
}

/** @throws SnapshotError if values contradict each other. */
function check(snapshot: Snapshot): void {
  const { answerStart, answering, kept, origins, supplied, tentative } = snapshot;
  const known = snapshot.committed.length + supplied.length;
  if (origins.length !== tentative.length) {
    throw brokenSnapshot(`${tentative.length} tentative tokens have ${origins.length} origins`);
  }
  if (kept > supplied.length) throw brokenSnapshot(`${kept} of ${supplied.length} supplied tokens are kept ones`);
  if (!answering && (supplied.length || tentative.length)) {
    throw brokenSnapshot("no answer is running, but tokens await the target");
  }
  if (answering && (answerStart === null || answerStart <= 0 || answerStart > known)) {
    throw brokenSnapshot(`an answer runs from position ${answerStart} of ${known} tokens`);
  }
}

// -- values of JSON -------------------------------------------------------------------------------

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export const UINT32 = 2n ** 32n - 1n;
export const UINT64 = 2n ** 64n - 1n;
export const LARGEST_REAL = 3e38; // largest number in the wire's float fields
const LONGEST_SHOWN = 60; // characters of an invalid value in an error message

/** A snapshot cannot be restored. The text of the conversation may still be usable. */
export class SnapshotError extends MoaError {
  override readonly name = "SnapshotError";
}

export function brokenSnapshot(what: string): SnapshotError {
  return new SnapshotError(`the snapshot is broken: ${what}; begin a new conversation`);
}

/** Return an integer for JSON: as a string if a double would not be exact. */
export function wholeToJson(value: bigint): number | string {
  return value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : String(value);
}

/** Read a value of {@link wholeToJson}; undefined if it is none. */
function wholeFromJson(value: unknown): bigint | undefined {
  if (typeof value === "number") return Number.isSafeInteger(value) && value >= 0 ? BigInt(value) : undefined;
  if (typeof value !== "string" || !/^[1-9][0-9]{15,19}$/.test(value)) return undefined;
  const whole = BigInt(value);
  return whole > BigInt(Number.MAX_SAFE_INTEGER) ? whole : undefined;
}

/** Reads values of the expected types from a JSON object. */
export class JsonReader {
  private readonly data: Record<string, unknown>;

  /**
   * @param name name of the object in error messages.
   * @param broken makes the error, a SnapshotError by default.
   * @throws MoaError if `data` is not an object. All methods that read a value throw it if the value is invalid.
   */
  constructor(
    data: unknown,
    name: string,
    private readonly broken: (what: string) => MoaError = brokenSnapshot,
  ) {
    if (typeof data !== "object" || data === null || Array.isArray(data)) {
      throw broken(`${name} must be an object, not ${shown(data)}`);
    }
    this.data = data as Record<string, unknown>;
  }

  has(key: string): boolean {
    return Object.hasOwn(this.data, key);
  }

  get(key: string): unknown {
    if (!this.has(key)) throw this.broken(`${key} is missing`);
    return this.data[key];
  }

  inner(key: string): JsonReader {
    return new JsonReader(this.get(key), key, this.broken);
  }

  text(key: string): string {
    const value = this.get(key);
    if (typeof value !== "string" || /\p{Surrogate}/u.test(value)) {
      throw this.broken(`${key} must be a text, not ${shown(value)}`);
    }
    return value;
  }

  flag(key: string): boolean {
    const value = this.get(key);
    if (typeof value !== "boolean") throw this.broken(`${key} must be true or false, not ${shown(value)}`);
    return value;
  }

  whole(key: string, most: bigint): bigint {
    const value = this.get(key);
    const whole = wholeFromJson(value);
    if (whole === undefined || whole > most) {
      throw this.broken(`${key} must be a whole number from 0 to ${most}, not ${shown(value)}`);
    }
    return whole;
  }

  /** An unsigned integer of 32 bits. */
  number(key: string): number {
    return Number(this.whole(key, UINT32));
  }

  real(key: string, least = 0, most = LARGEST_REAL): number {
    const value = this.get(key);
    // Negated, so that NaN is refused too.
    if (typeof value !== "number" || !(value >= least && value <= most)) {
      throw this.broken(`${key} must be a number from ${least} to ${most}, not ${shown(value)}`);
    }
    return value;
  }

  biases(key: string): [number, number][] {
    return this.list(key).map((pair) => {
      const [token, bias] = Array.isArray(pair) && pair.length === 2 ? (pair as unknown[]) : [];
      const isToken = typeof token === "number" && Number.isInteger(token) && token >= 0 && token <= Number(UINT32);
      if (isToken && typeof bias === "number" && bias >= -100 && bias <= 100) return [token, bias];
      throw this.broken(`${key} must be pairs of a token and a number from -100 to 100, not ${shown(pair)}`);
    });
  }

  tokens(key: string, vocabSize: number): number[] {
    return this.list(key).map((token) => {
      if (typeof token === "number" && Number.isInteger(token) && token >= 0 && token < vocabSize) return token;
      throw this.broken(`${key} must be token ids, whole numbers from 0 to ${vocabSize - 1}, not ${shown(token)}`);
    });
  }

  choice<T extends string>(key: string, values: readonly T[]): T {
    return this.member(key, this.get(key), values);
  }

  choices<T extends string>(key: string, values: readonly T[]): T[] {
    return this.list(key).map((value) => this.member(key, value, values));
  }

  list(key: string): unknown[] {
    const value = this.get(key);
    if (!Array.isArray(value)) throw this.broken(`${key} must be a list, not ${shown(value)}`);
    return value;
  }

  private member<T extends string>(key: string, value: unknown, values: readonly T[]): T {
    const found = values.find((each) => each === value);
    if (found === undefined) throw this.broken(`${key} knows ${values.join(", ")}, not ${shown(value)}`);
    return found;
  }
}

/** Return a value for an error message, shortened. */
export function shown(value: unknown): string {
  const text = (typeof value === "string" ? value || "none" : JSON.stringify(value)) ?? "nothing";
  return text.length <= LONGEST_SHOWN ? text : text.slice(0, LONGEST_SHOWN - 3) + "...";
}
