/** A runtime's chat whose answers a test writes, and stored chats in memory. */

import { AnswerUpdate } from "@moa-edge/runtime";
import type {
  AnswerFinished,
  ChatEvent,
  Message,
  SendOptions,
  Statistics,
  TextSpan,
  Unconfirmed,
} from "@moa-edge/runtime";

import { holds, summaryOf, type Chats, type StoredChat, type Summary } from "../src/chats.js";
import type { Host, Notice, Talk } from "../src/conversations.js";

export const STATISTICS: Statistics = {
  rounds: 3,
  tokens: 9,
  drafted: 8,
  accepted: 6,
  pushed: 0,
  serverDrafted: 0,
  serverAccepted: 0,
  streamed: false,
  fetched: 0,
  offline: 0,
  kept: 0,
  rolledBack: 0,
  droppedTurns: 0,
  takenBack: 0,
  reconnects: 0,
  bytesUp: 10,
  bytesDown: 2000,
  seconds: 2,
  firstTokenSeconds: 1,
  draftSeconds: 0,
  waitSeconds: 0,
  roundTrips: [0.1],
  dtype: "int4",
};

export function update(spans: readonly TextSpan[], dropped = ""): AnswerUpdate {
  return new AnswerUpdate({ spans, tokens: [], statistics: STATISTICS }, dropped);
}

export function finished(spans: readonly TextSpan[], reason: AnswerFinished["reason"] = "stop"): AnswerFinished {
  const text = spans.map((span) => span.text).join("");
  return { event: "AnswerFinished", text, tokens: [], reason, statistics: STATISTICS, spans };
}

/** Remembers what it is asked; `script` is what it answers with, and an Error in it is thrown. */
export class FakeTalk implements Talk {
  readonly target = "target-1";
  readonly recommended = null;
  script: (ChatEvent | Error)[] = [];
  /** What the verifier makes of an unconfirmed answer. */
  checked: ChatEvent[] = [];
  /** What the device had written when the user left; null where the verifier was there. */
  leftAlone: string | null = null;
  kept: ChatEvent[] | null = null;
  asked: string[] = [];
  restored: Message[] = [];
  readonly chat: { -readonly [name in keyof Talk["chat"]]: Talk["chat"][name] };

  constructor() {
    const talk = this;
    let messages: Message[] = [];
    let marks: Unconfirmed[] = [];
    this.chat = {
      link: { event: "LinkChanged", status: "online", detail: "", retryInS: null, late: false },
      newTokens: 5,
      thinking: undefined,
      tokenizer: { knowsThinking: true, beginsReasoning: (thinking?: boolean) => thinking === true },
      question: "",
      get messages() {
        return messages;
      },
      get unconfirmed() {
        return marks;
      },
      restore(turns: readonly Message[], unconfirmed: readonly Unconfirmed[] = []) {
        messages = talk.restored = [...turns];
        marks = [...unconfirmed];
      },
      send(text: string, { sampling }: SendOptions) {
        talk.asked.push(text);
        return talk.play(talk.script, () => {
          if (talk.leftAlone === null) return;
          messages = [...messages, { role: "user", content: text }, { role: "assistant", content: talk.leftAlone }];
          marks = [{ turn: messages.length - 1, sampling: sampling as Unconfirmed["sampling"], most: 40 }];
        });
      },
      continueAnswer: () => talk.play(talk.script),
      check: () => talk.play(marks.length > 0 ? talk.checked : []),
      keepMine: () => (talk.kept === null ? undefined : talk.play(talk.kept)),
      pending: () => undefined,
    } as unknown as Talk["chat"];
  }

  private async *play(
    script: readonly (ChatEvent | Error)[],
    left: () => void = () => undefined,
  ): AsyncGenerator<ChatEvent, void, undefined> {
    let whole = false;
    try {
      for (const event of script) {
        await Promise.resolve();
        if (event instanceof Error) throw event;
        whole = event.event === "AnswerFinished";
        yield event;
      }
    } finally {
      if (!whole) left();
    }
  }
}

export class MemoryChats implements Chats {
  readonly stored = new Map<string, StoredChat>();

  async list(words = ""): Promise<Summary[]> {
    return [...this.stored.values()].filter((chat) => words === "" || holds(chat, words)).map(summaryOf);
  }

  async get(id: string): Promise<StoredChat | null> {
    const chat = this.stored.get(id);
    return chat === undefined ? null : structuredClone(chat);
  }

  async put(chat: StoredChat): Promise<void> {
    this.stored.set(chat.id, structuredClone(chat));
  }

  async remove(id: string): Promise<void> {
    this.stored.delete(id);
  }
}

export class FakeHost implements Host {
  readonly told: Notice[] = [];
  readonly returned: string[] = [];

  changed(): void {
    // nothing is drawn here
  }

  tell(notice: Notice): void {
    this.told.push(notice);
  }

  giveBack(question: string): void {
    this.returned.push(question);
  }

  /** Press a button of the last sentence. */
  press(label: string): void {
    this.told.at(-1)!.actions.find((action) => action.label === label)!.run();
  }
}
