/** What a chat is made of. */

import type { Drafter } from "../drafters/base.js";
import type { Controller } from "../drafting/draft_controllers.js";
import type { LoopSettings } from "../drafting/settings.js";
import type { Host } from "../link/host.js";
import type { Timing } from "../link/timing.js";
import type { Policy } from "../session/events.js";
import type { Fingerprints } from "../session/handshake.js";
import type { ChatTokenizer } from "../text/chat_tokenizer.js";
import type { ChatStore } from "./chat_store.js";

/** What a chat needs of a `Bundle`. */
export interface ChatBundle {
  readonly manifest: {
    readonly fingerprints: Fingerprints;
    /** Ids that end the assistant's turn. */
    readonly stopTokens: readonly number[];
    /** Of the target. */
    readonly vocabSize: number;
    /** Tokens. */
    readonly maxContext: number;
  };
  tokenizer(): Promise<ChatTokenizer>;
}

/** Where the verifier is. */
export interface Where {
  /** `wss://HOST`, or `ws://HOST:PORT` on a network that you trust. */
  readonly url: string;
  /** The bearer token; empty for none. */
  readonly token?: string | undefined;
}

export interface ChatOptions {
  /** Of this chat alone. Undefined, and the server always drafts, or each round asks it for one token. */
  readonly drafter?: Drafter | undefined;
  /** What writes in an outage in the drafter's place; of this chat alone. */
  readonly writer?: Drafter | undefined;
  /** In which shape to draft; {@link CostModel} when omitted: the shape that pays. */
  readonly controller?: Controller;
  /** What becomes of text written offline; `rollback` when omitted. */
  readonly policy?: Policy;
  /** What is left out is as in `USUAL_SETTINGS`. */
  readonly settings?: Partial<LoopSettings>;
  /** What is left out is as in `USUAL_TIMING`. */
  readonly timing?: Partial<Timing>;
  /** A message at the beginning of a new conversation. */
  readonly system?: string;
  /**
   * Where to keep the conversation. The one that is there goes on, an answer that was under way included (`pending`); one
   * that cannot is set aside, and `storeProblem` says why.
   */
  readonly store?: ChatStore;
  /** Clock, timers and sockets; the browser's or Node's own when omitted. */
  readonly host?: Host;
}

export interface ConnectOptions extends ChatOptions {
  /** Until the verifier has answered, see `Chat.open`; yes when omitted. */
  readonly wait?: boolean;
}
