/** Parts and options of a chat. */

import type { ChatStore } from "./chat_store.js";
import type { ChatTokenizer } from "./chat_tokenizer.js";
import type { Timing } from "./connection.js";
import type { Drafter } from "./drafters/base.js";
import type { Controller } from "./drafting/draft_controllers.js";
import type { LoopSettings } from "./drafting/settings.js";
import type { Host } from "./host.js";
import type { Policy } from "./session/events.js";
import type { Fingerprints } from "./session/handshake.js";
import { GREEDY, type Sampling } from "./session/sampling.js";

export type Overflow = "error" | "trim";

/** The parts of a `Bundle` that a chat uses. */
export interface ChatBundle {
  readonly manifest: {
    readonly fingerprints: Fingerprints;
    /** Ids that end the assistant's turn. */
    readonly stopTokens: readonly number[];
    /** Size of the target's vocabulary. */
    readonly vocabSize: number;
    /** Tokens that the target's context holds. */
    readonly maxContext: number;
    /** Of the drafter; one with memory rows when omitted. */
    readonly architecture?: string;
  };
  tokenizer(): Promise<ChatTokenizer>;
}

/** Address and token of the verifier. */
export interface Where {
  /** `wss://HOST`, or `ws://HOST:PORT` on a network that you trust. */
  readonly url: string;
  /** The bearer token; empty for none. */
  readonly token?: string | undefined;
}

export interface ChatOptions {
  /** Clock, timers and sockets: `browserHost()` in a page or worker, `nodeHost()` in Node. */
  readonly host: Host;
  /** For this chat alone. If undefined, the server always drafts, or each round asks it for one token. */
  readonly drafter?: Drafter | undefined;
  /** Writes in place of the drafter during an outage; for this chat alone. */
  readonly writer?: Drafter | undefined;
  /** Decides the shape of drafts; {@link CostModel} when omitted. */
  readonly controller?: Controller;
  /** What happens to text that was written offline; `rollback` when omitted. */
  readonly policy?: Policy;
  /** Settings left out are as in `USUAL_SETTINGS`. */
  readonly settings?: Partial<LoopSettings>;
  /** Times left out are as in `USUAL_TIMING`. */
  readonly timing?: Partial<Timing>;
  /** A message at the beginning of a new conversation. */
  readonly system?: string;
  /**
   * What happens if a conversation outgrows the target's context. `error`, when omitted: the question is refused. `trim`: once it
   * leaves less than an eighth free, the target reads the system message and as many of the newest turns as take half.
   */
  readonly overflow?: Overflow;
  /**
   * Where to store the conversation. The stored one is continued, with an answer that was under way (`pending`). If it cannot
   * be, it is set aside, and `storeProblem` tells why.
   */
  readonly store?: ChatStore;
}

export interface ConnectOptions extends ChatOptions {
  /** Whether to wait until the verifier has answered, see `Chat.open`; yes when omitted. */
  readonly wait?: boolean;
}

/** Options of one answer. */
export interface SendOptions {
  /** Largest number of tokens of the answer; 0 for no limit. 512 when omitted. */
  readonly maxNewTokens?: number;
  /** Greedy when omitted: temperature 0, top_p 1, seed 0. */
  readonly sampling?: Partial<Sampling>;
  /** Whether the verifier may finish the answer while there is no link. Yes when omitted. */
  readonly whileAway?: boolean;
}

/** Return a sampling with the defaults of greedy. */
export function samplingOf(sampling: Partial<Sampling>): Sampling {
  return { ...GREEDY, ...sampling };
}
