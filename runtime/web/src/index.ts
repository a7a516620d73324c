/** The device's end of moa-edge. */

export { ClientSession, type ClientOptions } from "./session/client.js";
export type * from "./session/events.js";
export { digest, type Fingerprints, type Limits } from "./session/handshake.js";
export type { LinkState } from "./session/link.js";
export type { Numbers } from "./session/rows.js";
export { GREEDY, type Sampling } from "./session/sampling.js";
export type { SnapshotJson } from "./session/snapshot.js";
export { SnapshotError } from "./session/snapshot_reader.js";
export { LocalProtocolError } from "./session/state.js";
export type { DraftTree } from "./session/tree.js";
export * as wire from "./wire/moa/v1/session_pb.js";
