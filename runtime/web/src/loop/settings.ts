/** What a host may say to the drafting loop. */

/** `auto` is whoever is expected to bring more tokens a second, see `Placement`. */
export type Drafting = "auto" | "device" | "server";

/** `writer`: the bundle's whole model, or the drafter where it has none. `off`: nothing, the answer waits. */
export type Offline = "writer" | "drafter" | "off";

/** Limits of the drafting loop. */
export interface LoopSettings {
  /** Tentative tokens written at most without the target. */
  readonly offlineLimit: number;
  /** A draft's verdict that takes longer is late: the device writes on alone. Seconds. */
  readonly lateAfterS: number;
  /** The same for a prompt's verdict. */
  readonly prefillLateAfterS: number;
  /** A link that is down for longer is an outage: what was written since the last frame is offline text. */
  readonly outageAfterS: number;
  /** Who drafts while the link is up. */
  readonly drafting: Drafting;
  /** What writes while there is no verifier. */
  readonly offline: Offline;
}

export const USUAL_SETTINGS: LoopSettings = {
  offlineLimit: 256,
  lateAfterS: 2,
  prefillLateAfterS: 6,
  outageAfterS: 1,
  drafting: "auto",
  offline: "writer",
};

/** What the host knows of the device. */
export interface Conditions {
  /** Nobody looks: nothing is drafted or asked for until that is over. */
  readonly background: boolean;
  /** The model takes no steps: drafts are copies only, and nothing is written alone. */
  readonly lowPower: boolean;
  /** Bytes cost money: the server sends no memory rows, so drafts are copies only. */
  readonly metered: boolean;
}

export const USUAL_CONDITIONS: Conditions = { background: false, lowPower: false, metered: false };
