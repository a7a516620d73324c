/**
 * The transition table of the client session: `ClientSession` looks up every call of the application and every frame of
 * the server here. `docs/protocol.md` shows the table and describes each effect; the Python runtime has the same one.
 */

/** State of a client session. */
export type State =
  | "down" // not connected, no answer is running
  | "offlineAnswering" // not connected, an answer is running
  | "handshake" // Hello sent, no answer is running
  | "resuming" // Hello sent, an answer is running
  | "idle" // connected, no answer is running
  | "needsPrompt" // an answer is running, and the server lacks tokens that only a Prompt can give it
  | "drafting" // an answer is running, and the device may send a Draft
  | "prompted" // waiting for the Verdict on a Prompt
  | "proposed" // waiting for the Verdict on a Draft, or for the one announced by the Welcome
  | "streaming" // the server pushes Verdicts within its credit
  | "revoking"; // the credit is revoked, waiting for CreditRevoked

const NO_ANSWER: readonly State[] = ["down", "handshake", "idle"];
const NOT_CONNECTED: readonly State[] = ["offlineAnswering", "resuming"];
const CLIENTS_TURN: readonly State[] = ["needsPrompt", "drafting"];
/** States in which the next frame is due from the server. */
export const AWAITING: readonly State[] = ["prompted", "proposed", "streaming", "revoking"];
const ANSWERING: readonly State[] = [...NOT_CONNECTED, ...CLIENTS_TURN, ...AWAITING];
const CONNECTED: readonly State[] = ["idle", ...CLIENTS_TURN, ...AWAITING];
const ALL: readonly State[] = [...NO_ANSWER, ...ANSWERING];

/** Call of the application: a method of `ClientSession`. */
export type Call =
  | "connect"
  | "disconnected"
  | "prompt"
  | "continueAnswer"
  | "extend"
  | "propose"
  | "sendUnsolicited"
  | "grantCredit"
  | "revokeCredit"
  | "resend"
  | "resume"
  | "cancel"
  | "rewind"
  | "keep";

type NextStates = { readonly [state in State]?: readonly State[] };

/** Rule for a call. */
export interface Rule {
  /** States in which the call is allowed, with the states that may follow each. */
  readonly nextStates: NextStates;
  /** Message of the LocalProtocolError thrown in all other states; without one the call does nothing there. */
  readonly refusal?: string;
}

function allTo(states: readonly State[], ...following: State[]): NextStates {
  return Object.fromEntries(states.map((state) => [state, following]));
}

function stay(states: readonly State[]): NextStates {
  return Object.fromEntries(states.map((state) => [state, [state]]));
}

export const CALLS: { readonly [call in Call]: Rule } = {
  connect: {
    nextStates: { down: ["handshake"], offlineAnswering: ["resuming"] },
    refusal: "can't connect while the link is {link}",
  },
  disconnected: { nextStates: { ...allTo(NO_ANSWER, "down"), ...allTo(ANSWERING, "offlineAnswering") } },
  prompt: {
    nextStates: { down: ["offlineAnswering"], handshake: ["resuming"], idle: ["prompted"] },
    refusal: "can't take a prompt while an answer is running; cancel it first",
  },
  continueAnswer: {
    nextStates: { down: ["offlineAnswering"], handshake: ["resuming"], idle: ["needsPrompt", "prompted"] },
    refusal: "can't continue an answer while one is running; cancel it first",
  },
  extend: { nextStates: stay(ANSWERING), refusal: "can't extend: no answer is running" },
  propose: { nextStates: { drafting: ["proposed"] } },
  sendUnsolicited: {
    nextStates: stay(["streaming"]),
    refusal: "can't send an unsolicited draft of position {position}: the link is {link}, {known} tokens are known",
  },
  grantCredit: {
    nextStates: { drafting: ["streaming"], prompted: ["prompted"], proposed: ["proposed"], streaming: ["streaming"] },
    refusal: "can't grant credit up to position {position}: the link is {link}, {known} tokens are known",
  },
  revokeCredit: {
    nextStates: { prompted: ["prompted", "revoking"], proposed: ["proposed", "revoking"], streaming: ["revoking"] },
  },
  resend: { nextStates: stay(["drafting", ...AWAITING]) },
  resume: { nextStates: { needsPrompt: ["needsPrompt", "prompted"] } },
  cancel: {
    nextStates: {
      ...allTo(["down", "offlineAnswering"], "down"),
      ...allTo(["handshake", "resuming"], "handshake"),
      ...allTo(CONNECTED, "idle"),
    },
  },
  rewind: { nextStates: stay(NO_ANSWER), refusal: "can't rewind while an answer is running; cancel it first" },
  keep: {
    nextStates: {
      ...allTo(["down", "offlineAnswering"], "offlineAnswering"),
      ...allTo(["handshake", "resuming"], "resuming"),
      ...allTo(CONNECTED, "prompted"),
    },
  },
};

/** Kind of a frame from the server. `stale`: Verdict, CreditRevoked or Fault of another epoch. */
export type Event = "welcome" | "verdict" | "creditRevoked" | "stale" | "rows" | "pong" | "outOfSync" | "fault";

/** What the session does with a frame. */
export type Action =
  | "drop"
  | "cancelStaleAnswer" // send Cancel, if the server's epoch is neither 0 nor the client's
  | "reconcile" // continue if both ends agree; else send Prompt with the tokens that the server lacks
  | "commit" // commit the new tokens
  | "commitIfResent" // commit the new tokens, if something was sent twice on this connection; else drop the frame
  | "endRevocation" // end the revocation, if the serial is that of the newest Credit
  | "storeRows" // pass on the rows of committed tokens, up to a gap or a truncation
  | "passEcho" // pass on the echo
  | "replay" // send Prompt from the server's length on; after eight faults without a Verdict, report the fault
  | "report"; // report the fault to the application

/** What a frame does in a state. */
export interface Transition {
  readonly action: Action;
  /** States that may follow. The state stays if there are none, if the frame is broken, and if it brings nothing new. */
  readonly nextStates: readonly State[];
}

type Transitions = { readonly [state in State]?: Transition };

function each(states: readonly State[], action: Action, ...nextStates: State[]): Transitions {
  return Object.fromEntries(states.map((state) => [state, { action, nextStates }]));
}

// The last two: the policy `keep` overrules the verdict.
const ENDED: readonly State[] = ["idle", "needsPrompt", "prompted"];

/** Transitions by event and state; a frame is dropped in states without a transition. */
export const FRAMES: { readonly [event in Event]: Transitions } = {
  welcome: {
    ...each(["handshake"], "cancelStaleAnswer", "idle"),
    ...each(["resuming"], "reconcile", "needsPrompt", "drafting", "prompted", "proposed", "streaming"),
  },
  verdict: {
    ...each(["prompted", "proposed", "streaming"], "commit", "idle", "needsPrompt", "drafting", "prompted", "streaming"),
    ...each(["revoking"], "commit", ...ENDED),
    ...each(["drafting"], "commitIfResent", ...ENDED),
  },
  creditRevoked: each(["revoking"], "endRevocation", "drafting", "prompted", "proposed"),
  stale: {},
  rows: each(ALL, "storeRows"),
  pong: each(ALL, "passEcho"),
  outOfSync: {
    ...each(AWAITING, "replay", "needsPrompt", "prompted"),
    ...each([...CLIENTS_TURN, ...NOT_CONNECTED], "report"),
  },
  fault: each(ALL, "report"),
};

const DROPPED: Transition = { action: "drop", nextStates: [] };

/** What a frame does in a state. */
export function transition(event: Event, state: State): Transition {
  return FRAMES[event][state] ?? DROPPED;
}
