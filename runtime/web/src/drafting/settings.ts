/** Settings of the drafting loop. */

/** The side that drafts while the link is up; `auto`: the one that is expected to be faster, see `DrafterSelection`. */
export type Drafting = "auto" | "device" | "server";

/** What writes during an outage. `writer`: the bundle's whole model, or the drafter without one. `off`: the answer waits. */
export type Offline = "writer" | "drafter" | "off";

/** Limits of the drafting loop. */
export interface LoopSettings {
  /** Tokens written without the target, at most. */
  readonly offlineLimit: number;
  /** Seconds after which a draft's verdict is late and the device writes on alone. */
  readonly lateAfterS: number;
  /** The same for a prompt's verdict. */
  readonly prefillLateAfterS: number;
  /** Seconds after which a link that is down is an outage: text written since the last frame becomes offline text. */
  readonly outageAfterS: number;
  /** The side that drafts while the link is up. */
  readonly drafting: Drafting;
  /** What writes during an outage. */
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

/** The state of the device, as the host knows it. */
export interface Conditions {
  /** The app is not visible: nothing is drafted or asked for until it is. */
  readonly background: boolean;
  /** The model takes no steps: drafts are copies only, and nothing is written offline. */
  readonly lowPower: boolean;
  /** Bytes cost money: the server sends no memory rows, so drafts are copies only. */
  readonly metered: boolean;
}

export const USUAL_CONDITIONS: Conditions = { background: false, lowPower: false, metered: false };
