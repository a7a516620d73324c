/** The device's end of moa-edge. */

export { GrowingTree } from "./drafters/growing_tree.js";
export { Luck, type DraftToken } from "./drafters/luck.js";
export { NgramMixture } from "./drafters/mixture.js";
export { NgramIndex, type Match } from "./drafters/ngram.js";
export { NgramDrafter } from "./drafters/ngram_drafter.js";
export { ClientSession, type ClientOptions } from "./session/client.js";
export type * from "./session/events.js";
export { digest, type Fingerprints, type Limits } from "./session/handshake.js";
export type { LinkState } from "./session/link.js";
export type { Numbers } from "./session/rows.js";
export { GREEDY, type Sampling } from "./session/sampling.js";
export type { SnapshotJson } from "./session/snapshot.js";
export { SnapshotError } from "./session/snapshot_reader.js";
export { LocalProtocolError } from "./session/state.js";
export { likeliestPath, type Branches, type DraftTree } from "./session/tree.js";
export { budgetOf, type Budget, type Prices } from "./loop/budget.js";
export { FixedShape, type Controller } from "./loop/control.js";
export { RowsMismatchError, type Drafter } from "./loop/drafter.js";
export type * from "./loop/events.js";
export { DraftingLoop, type AskOptions } from "./loop/loop.js";
export type { Manners } from "./loop/manners.js";
export type { Conditions, Drafting, LoopSettings, Offline } from "./loop/settings.js";
export { Throughput } from "./loop/throughput.js";
export { gumbel } from "./noise.js";
export * as wire from "./wire/moa/v1/session_pb.js";
