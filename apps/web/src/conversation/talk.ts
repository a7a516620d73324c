/** What a conversation needs of the runtime and of the page. */

import type { Chat } from "@moa-edge/runtime";

import type { Recommended } from "../settings.js";

/** The runtime's chat, and what its bundle says. */
export interface Talk {
  readonly chat: Pick<
    Chat,
    "send" | "continueAnswer" | "keepMine" | "pending" | "check" | "restore" | "messages" | "unconfirmed" | "question" | "link" | "newTokens"
  >;
  /** Fingerprint of the target. */
  readonly target: string;
  readonly recommended: Recommended | null;
}

/** A sentence for the user, and what can be done about it. */
export interface Notice {
  readonly text: string;
  readonly actions: readonly { readonly label: string; readonly run: () => void }[];
}

/** The page around a conversation. */
export interface Host {
  /** Something is to be drawn anew. */
  changed(): void;
  tell(notice: Notice): void;
  /** A question that could not be asked goes back to where it was written. */
  giveBack(question: string): void;
}
