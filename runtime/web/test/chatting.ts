/** A chat with a toy verifier on a clock that jumps. */

import { Chat, ChatTokenizer, NgramDrafter, StoreError } from "../src/index.js";
import type { AnswerStream, ChatBundle, ChatEvent, ChatOptions, ChatStore, SnapshotJson } from "../src/index.js";
import { FakeHost } from "./fake_host.js";
import { ToyVerifier, choice } from "./toy_verifier.js";
import { readJson } from "./vectors.js";

const TEMPLATE =
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}" +
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

export const tokenizer = new ChatTokenizer(readJson("texts/tokenizer.json"), TEMPLATE, {}, [2]);

export const bundle: ChatBundle = {
  manifest: {
    fingerprints: { target: "target", tokenizer: "tokenizer", drafter: "" },
    stopTokens: [2],
    vocabSize: 512,
    maxContext: 512,
  },
  tokenizer: () => Promise.resolve(tokenizer),
};

/** A store in memory, of one chat at a time. */
export class MemoryChatStore implements ChatStore {
  readonly name = "memory";
  /** What was written, by name; as JSON, as it would be read. */
  static readonly kept = new Map<string, string>();
  /** The names of those that are open. */
  static readonly open = new Set<string>();
  /** What writing fails with. */
  failure: string | TypeError = "";
  writes = 0;

  constructor(private readonly key: string) {}

  open(): Promise<unknown> {
    if (MemoryChatStore.open.has(this.key)) return Promise.reject(new StoreError("the chat is open in another tab"));
    MemoryChatStore.open.add(this.key);
    const text = MemoryChatStore.kept.get(this.key);
    return Promise.resolve(text === undefined ? undefined : JSON.parse(text));
  }

  write(content: SnapshotJson): Promise<void> {
    this.writes++;
    const { failure } = this;
    if (failure) return Promise.reject(typeof failure === "string" ? new StoreError(failure) : failure);
    MemoryChatStore.kept.set(this.key, JSON.stringify(content));
    return Promise.resolve();
  }

  setAside(): Promise<string> {
    MemoryChatStore.kept.set("aside", MemoryChatStore.kept.get(this.key)!);
    MemoryChatStore.kept.delete(this.key);
    return Promise.resolve("aside");
  }

  close(): Promise<void> {
    MemoryChatStore.open.delete(this.key);
    return Promise.resolve();
  }
}

export class ChatWorld {
  readonly host = new FakeHost();
  readonly verifier = new ToyVerifier(this.host);
  chat!: Chat;

  /** Another program with the same chat; the one before was killed, if it was not closed. */
  async begin(options: Partial<ChatOptions> = {}): Promise<Chat> {
    const settings = { drafting: "device", ...options.settings } as const;
    const all = { drafter: new NgramDrafter([2]), ...options, host: this.host, settings };
    this.chat = await Chat.create(bundle, { url: "ws://toy" }, all);
    const opening = this.chat.open(false);
    await this.host.pass(0.5);
    await opening;
    return this.chat;
  }

  /** What `promise` comes to, while time passes. */
  async within<T>(seconds: number, promise: Promise<T>): Promise<T> {
    let done = false;
    void promise.finally(() => (done = true)).catch(() => undefined);
    for (let passed = 0; passed < seconds && !done; passed += 0.05) await this.host.pass(0.05);
    if (!done) throw new Error(`it took longer than ${seconds} s`);
    return promise;
  }

  /** All events of an answer, or those up to the one that `enough` says is the last wanted. */
  async follow(events: AnswerStream, enough: (event: ChatEvent) => boolean = () => false): Promise<ChatEvent[]> {
    const seen: ChatEvent[] = [];
    const following = (async () => {
      for await (const event of events) {
        seen.push(event);
        if (enough(event)) break;
      }
      return seen;
    })();
    return this.within(60, following);
  }

  async end(): Promise<void> {
    await this.within(5, this.chat.close());
  }
}

/** The target's own answer after `start` tokens. */
export function own(start: number, count: number): number[] {
  return Array.from({ length: count }, (_, at) => choice(start + at));
}
