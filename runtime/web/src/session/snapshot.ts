/** A session at one moment as JSON: written by one program, read by the next. */

import { ORIGINS, POLICIES, type Origin, type Policy } from "./events.js";
import type { Fingerprints, Limits } from "./handshake.js";
import type { Sampling } from "./sampling.js";
import { Reader, SnapshotError, UINT32, UINT64, brokenSnapshot, saidWhole, shown, type Json } from "./snapshot_reader.js";

export const SNAPSHOT_VERSION = 3;

/** The keys are those of the Python runtime. Whole numbers above 2^53 - 1 are texts. */
export type SnapshotJson = { [key: string]: Json };

/** What outlives the program; the parts are those of a session. */
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

/** With the version, and for whom the tokens are. */
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
    epoch: saidWhole(snapshot.epoch),
    connection: saidWhole(snapshot.connection),
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
 * The snapshot, if it is whole and was made of the same target's tokens.
 *
 * @throws SnapshotError it is not.
 */
export function snapshotFromJson(data: unknown, fingerprints: Fingerprints, vocabSize: number): Snapshot {
  const top = new Reader(data, "a snapshot");
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
    epoch: top.whole("epoch", UINT64 / 2n), // room to go on counting
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

function limitsFrom(limits: Reader): Limits {
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

export function samplingToJson({ minP, seed, temperature, topK, topP }: Sampling): SnapshotJson {
  return { temperature, top_p: topP, seed: saidWhole(seed), top_k: topK, min_p: minP };
}

/** What {@link samplingToJson} made. */
export function samplingFrom(sampling: Reader): Sampling {
  return {
    temperature: sampling.real("temperature"),
    topP: sampling.real("top_p"),
    seed: sampling.whole("seed", UINT64),
    topK: Number(sampling.whole("top_k", UINT32)),
    minP: sampling.real("min_p"),
  };
}

/** That the parts fit together. */
function check(snapshot: Snapshot): void {
  const { answerStart, answering, kept, origins, supplied, tentative } = snapshot;
  const known = snapshot.committed.length + supplied.length;
  if (origins.length !== tentative.length) {
    throw brokenSnapshot(`${tentative.length} tentative tokens have ${origins.length} origins`);
  }
  if (kept > supplied.length) throw brokenSnapshot(`${kept} of ${supplied.length} supplied tokens are kept ones`);
  if (!answering && (supplied.length || tentative.length)) {
    throw brokenSnapshot("no answer runs, and yet tokens await the target");
  }
  if (answering && (answerStart === null || answerStart <= 0 || answerStart > known)) {
    throw brokenSnapshot(`an answer runs from position ${answerStart} behind ${known} tokens`);
  }
}
