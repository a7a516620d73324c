/**
 * The rules of the device's end as a table: what a call does in which state, and what an arriving frame.
 *
 * `ClientSession` looks everything up here. What a call or a rule does in words: `client_states.py`, `docs/porting.md`.
 */

/** Where a client session is. */
export type State =
  | "down" // no connection, no answer runs
  | "writing" // no connection, an answer runs
  | "greeting" // the Hello is sent, no answer runs
  | "returning" // the Hello is sent, an answer runs
  | "idle" // the link is up, no answer runs
  | "owing" // an answer runs, and the server lacks tokens that only a Prompt gives it
  | "drafting" // an answer runs, and the device may propose
  | "prompted" // the verdict on a Prompt is awaited
  | "proposed" // the verdict on a Draft is awaited, or the one that the Welcome announced
  | "lent" // the server goes on by itself, within the credit
  | "reclaiming"; // the credit is withdrawn, the Standing is awaited

const IDLE: readonly State[] = ["down", "greeting", "idle"];
const AWAY: readonly State[] = ["writing", "returning"];
const OURS: readonly State[] = ["owing", "drafting"];
/** The server is to speak next. */
export const AWAITING: readonly State[] = ["prompted", "proposed", "lent", "reclaiming"];
const RUNNING: readonly State[] = [...AWAY, ...OURS, ...AWAITING];
const UP: readonly State[] = ["idle", ...OURS, ...AWAITING];
const ALL: readonly State[] = [...IDLE, ...RUNNING];

/** What the application asks for. */
export type Call =
  | "connect"
  | "disconnected"
  | "prompt"
  | "continueAnswer"
  | "extend"
  | "propose"
  | "lend"
  | "takeOver"
  | "resend"
  | "resume"
  | "cancel"
  | "rewind"
  | "keep";

type Leads = { readonly [state in State]?: readonly State[] };

/**
 * A call: what may follow in the states in which it does something, and the sentence of the LocalProtocolError in all
 * others; without one nothing happens there.
 */
export interface Rule {
  readonly leads: Leads;
  readonly refusal?: string;
}

function allTo(states: readonly State[], ...following: State[]): Leads {
  return Object.fromEntries(states.map((state) => [state, following]));
}

function stay(states: readonly State[]): Leads {
  return Object.fromEntries(states.map((state) => [state, [state]]));
}

export const CALLS: { readonly [call in Call]: Rule } = {
  connect: {
    leads: { down: ["greeting"], writing: ["returning"] },
    refusal: "can't connect while the link is {link}",
  },
  disconnected: { leads: { ...allTo(IDLE, "down"), ...allTo(RUNNING, "writing") } },
  prompt: {
    leads: { down: ["writing"], greeting: ["returning"], idle: ["prompted"] },
    refusal: "can't take a prompt while an answer runs; cancel it first",
  },
  continueAnswer: {
    leads: { down: ["writing"], greeting: ["returning"], idle: ["owing", "prompted"] },
    refusal: "can't continue an answer while one runs; cancel it first",
  },
  extend: { leads: stay(RUNNING), refusal: "can't extend: no answer runs" },
  propose: { leads: { drafting: ["proposed"] } },
  lend: {
    leads: { drafting: ["lent"], prompted: ["prompted"], proposed: ["proposed"], lent: ["lent"] },
    refusal: "can't lend a credit up to {position}: the link is {link}, {known} known",
  },
  takeOver: {
    leads: { prompted: ["prompted", "reclaiming"], proposed: ["proposed", "reclaiming"], lent: ["reclaiming"] },
  },
  resend: { leads: stay(["drafting", ...AWAITING]) },
  resume: { leads: { owing: ["owing", "prompted"] } },
  cancel: {
    leads: {
      ...allTo(["down", "writing"], "down"),
      ...allTo(["greeting", "returning"], "greeting"),
      ...allTo(UP, "idle"),
    },
  },
  rewind: { leads: stay(IDLE), refusal: "can't rewind while an answer runs; cancel it first" },
  keep: {
    leads: {
      ...allTo(["down", "writing"], "writing"),
      ...allTo(["greeting", "returning"], "returning"),
      ...allTo(UP, "prompted"),
    },
  },
};

/** What a frame from the server says. `stale`: a Verdict, Standing or Fault of another epoch. */
export type Heard = "welcome" | "verdict" | "standing" | "stale" | "rows" | "pong" | "outOfSync" | "fault";

/** What comes of a frame. */
export type Does =
  | "drop"
  | "settle" // a Cancel, if the server's epoch is another one and not 0
  | "reconcile" // goes on where both ends are alike; else a Prompt with what the server lacks
  | "commit" // what is new in it is committed
  | "commitCopy" // what is new in it is committed, if something was sent twice on this connection; else dropped
  | "stand" // the server stands, if the serial is that of the newest Credit
  | "store" // rows of what is committed are handed on, up to a gap or a cut
  | "note" // its echo is handed on
  | "replay" // a Prompt from where the server is; after eight without a verdict the fault is told
  | "tell"; // told to the application

/**
 * What a frame does in a state, and what may follow: the state stays where nothing is named, and wherever a frame is
 * broken or says nothing new.
 */
export interface Row {
  readonly does: Does;
  readonly leads: readonly State[];
}

type Rows = { readonly [state in State]?: Row };

function rows(states: readonly State[], does: Does, ...leads: State[]): Rows {
  return Object.fromEntries(states.map((state) => [state, { does, leads }]));
}

const ENDED: readonly State[] = ["idle", "owing", "prompted"]; // or overruled by the policy `keep`

/** What is missing is dropped. */
export const FRAMES: { readonly [heard in Heard]: Rows } = {
  welcome: {
    ...rows(["greeting"], "settle", "idle"),
    ...rows(["returning"], "reconcile", "owing", "drafting", "prompted", "proposed", "lent"),
  },
  verdict: {
    ...rows(["prompted", "proposed", "lent"], "commit", "idle", "owing", "drafting", "prompted", "lent"),
    ...rows(["reclaiming"], "commit", ...ENDED),
    ...rows(["drafting"], "commitCopy", ...ENDED),
  },
  standing: rows(["reclaiming"], "stand", "drafting", "prompted", "proposed"),
  stale: {},
  rows: rows(ALL, "store"),
  pong: rows(ALL, "note"),
  outOfSync: { ...rows(AWAITING, "replay", "owing", "prompted"), ...rows([...OURS, ...AWAY], "tell") },
  fault: rows(ALL, "tell"),
};

const DROPPED: Row = { does: "drop", leads: [] };

/** The table's row of a frame in a state. */
export function rowOf(heard: Heard, state: State): Row {
  return FRAMES[heard][state] ?? DROPPED;
}
