/** What a native program may request of the core, by name. */

import type { AnswerStream } from "../answer_stream.js";
import { DeferredGraph } from "../backends/deferred.js";
import type { Graph } from "../backends/base.js";
import { Bundle } from "../bundle/bundle.js";
import { BundleError, MANIFEST_FILE, hasGraph, readManifest, type Manifest } from "../bundle/manifest.js";
import { Chat } from "../chat.js";
import type { ChatOptions, SendOptions } from "../chat_options.js";
import type { Message } from "../chat_tokenizer.js";
import { markFromJson, markToJson } from "../conversation.js";
import { copyingDrafter, drafterOf, drafterPlan, writerPlan } from "../drafters/factory.js";
import type { MoaDrafter } from "../drafters/moa.js";
import type { NgramDrafter } from "../drafters/ngram.js";
import type { Conditions, Offline } from "../drafting/settings.js";
import { MoaError } from "../errors.js";
import type { AnswerUpdate, ChatEvent, LinkChanged } from "../events.js";
import type { Policy } from "../session/events.js";
import type { SnapshotJson } from "../session/snapshot.js";
import { TextChatStore } from "../text_chat_store.js";
import { decodeUtf8 } from "../utf8.js";
import type { NativeBridge } from "./bridge.js";

/** Arguments of `open`. Those left out are as in `ChatOptions`. */
export interface OpenRequest extends Pick<ChatOptions, "system" | "policy" | "overflow" | "settings" | "timing"> {
  /** Address of the verifier. */
  readonly url: string;
  readonly token?: string;
  /** The target whose graphs the program runs: `coreml`, `executorch`, `onnx`, `web`; without one the server drafts. */
  readonly graphs?: string;
  /** Name of the chat in the program's store; without one it is not stored. */
  readonly store?: string;
  /** Whether to wait until the verifier has answered; no when omitted. */
  readonly wait?: boolean;
}

/** Arguments of `send` and `continue`. Those left out are as in `SendOptions`; the seed is a text. */
export interface AnswerRequest {
  readonly chat: number;
  readonly text?: string;
  readonly maxNewTokens?: number;
  readonly temperature?: number;
  readonly topP?: number;
  readonly seed?: string;
  readonly whileAway?: boolean;
  /** A name for the answer, see `stop`. */
  readonly answer?: string;
}

interface OpenChat {
  readonly chat: Chat;
  readonly drafters: readonly (MoaDrafter | NgramDrafter)[];
  /** The answer that is followed, and its name. */
  answer: { readonly stream: AnswerStream; readonly name: unknown } | undefined;
}

type Report = (event: ChatEvent | ReportedUpdate) => void;

/** An `AnswerUpdate` as it is reported: with the spans of its tentative text, so that a program can mark what was written offline. */
type ReportedUpdate = Pick<AnswerUpdate, "event" | "text" | "tentative" | "start" | "dropped" | "spans">;

/** The chats of a native program, by number. */
export class Requests {
  private readonly chats = new Map<number, OpenChat>();
  private last = 0;
  private bundle: Promise<Bundle> | undefined;
  private readonly graphs = new Map<string, Promise<Graph>>();

  /** @param onLink called when the link of a chat changes. */
  constructor(
    private readonly bridge: NativeBridge,
    private readonly onLink: (chat: number, link: LinkChanged) => void,
  ) {}

  /**
   * Do what a request says, and return its result.
   *
   * | name | arguments, `chat` besides | result |
   * | --- | --- | --- |
   * | `open` | {@link OpenRequest}, without `chat` | `{chat, pending, storeProblem}` |
   * | `send`, `continue`, `pending`, `check`, `keepMine` | {@link AnswerRequest} | whether there was an answer to follow; its events before |
   * | `stop` | `answer`: its name; without one the present answer | after it has stopped; an earlier one has stopped already |
   * | `state` | | `{status, detail, retryInS, late, messages, unconfirmed, question, storeProblem, tokens}` |
   * | `restore` | `messages`, `unconfirmed` | |
   * | `set` | `policy`, `offline`, `thinking` | |
   * | `conditions` | `background`, `lowPower`, `metered` | |
   * | `workOffline` | `offline` | |
   * | `networkChanged`, `save`, `close` | | |
   *
   * @param report takes the events of an answer.
   * @throws MoaError as the methods of `Chat` do.
   */
  async do(name: string, given: { readonly [name: string]: unknown }, report: Report): Promise<unknown> {
    if (name === "open") return this.open(given as unknown as OpenRequest);
    const number = given["chat"] as number;
    const open = this.chats.get(number);
    if (!open) throw new MoaError(`there is no chat ${number}: it was closed, or never opened`);
    const { chat } = open;
    switch (name) {
      case "send":
        return this.follow(open, chat.send((given["text"] as string | undefined) ?? "", optionsOf(given)), given, report);
      case "continue":
        return this.follow(open, chat.continueAnswer(optionsOf(given)), given, report);
      case "pending":
        return this.follow(open, chat.pending(), given, report);
      case "check":
        return this.follow(open, chat.check(), given, report);
      case "keepMine":
        return this.follow(open, chat.keepMine(), given, report);
      case "stop":
        if (given["answer"] === undefined || given["answer"] === open.answer?.name) await open.answer?.stream.return();
        return undefined;
      case "state":
        return stateOf(chat);
      case "restore":
        chat.restore(given["messages"] as Message[], ((given["unconfirmed"] as unknown[] | undefined) ?? []).map(markOf));
        return undefined;
      case "set":
        if (given["policy"] !== undefined) chat.policy = given["policy"] as Policy;
        if (given["offline"] !== undefined) chat.offline = given["offline"] as Offline;
        if (given["thinking"] !== undefined) chat.thinking = (given["thinking"] as boolean | null) ?? undefined;
        return undefined;
      case "conditions":
        chat.tellConditions(given as Partial<Conditions>);
        return undefined;
      case "workOffline":
        return chat.workOffline(given["offline"] === true);
      case "networkChanged":
        return chat.networkChanged();
      case "save":
        return chat.save();
      case "close":
        this.chats.delete(number);
        await chat.close();
        for (const drafter of open.drafters) if ("close" in drafter) drafter.close();
        return undefined;
      default:
        throw new MoaError(`there is no request ${JSON.stringify(name)}`);
    }
  }

  private async open(given: OpenRequest): Promise<unknown> {
    const { bridge } = this;
    const bundle = await this.openBundle();
    const { drafter, writer } = await this.drafters(bundle.manifest, given.graphs);
    const { graphs: _, store, token, url, wait = false, ...options } = given;
    const chat = await Chat.connect(
      bundle,
      { url, token },
      {
        ...options,
        ...present({ store: store === undefined ? undefined : new TextChatStore(store, bridge) }),
        host: bridge,
        drafter,
        writer,
        wait,
      },
    );
    const number = ++this.last;
    const drafters = [drafter, writer].filter((each) => each !== undefined);
    this.chats.set(number, { chat, drafters, answer: undefined });
    chat.onLink = (link) => this.onLink(number, link);
    return { chat: number, pending: chat.pending() !== undefined, storeProblem: chat.storeProblem };
  }

  /** Open the bundle once; again if that failed. */
  private async openBundle(): Promise<Bundle> {
    const { bridge } = this;
    this.bundle ??= bridge.read(MANIFEST_FILE).then((bytes) => new Bundle(readManifest(decodeUtf8(bytes)), bridge));
    try {
      return await this.bundle;
    } catch (error) {
      this.bundle = undefined;
      throw error;
    }
  }

  private async drafters(manifest: Manifest, target: string | undefined): Promise<{ drafter: MoaDrafter | NgramDrafter | undefined; writer: MoaDrafter | undefined }> {
    if (target === undefined) return { drafter: copyingDrafter(manifest), writer: undefined };
    const half = manifest.targets.get(target);
    if (!half && hasGraph(manifest.architecture)) {
      throw new BundleError(`the bundle has no graph for ${target}: export it with --target ${target}`);
    }
    const drafter = half ? drafterOf(drafterPlan(manifest), await this.graph("drafter", manifest, target)) : copyingDrafter(manifest);
    const whole = manifest.writers.get(target);
    const writer = whole && drafterOf(writerPlan(manifest, whole), new DeferredGraph(() => this.graph("writer", manifest, target)));
    return { drafter, writer };
  }

  /** Load a graph once; again if that failed. */
  private async graph(model: "drafter" | "writer", manifest: Manifest, target: string): Promise<Graph> {
    const entry = (model === "drafter" ? manifest.targets : manifest.writers).get(target)!;
    const loaded = this.graphs.get(entry.file) ?? this.bridge.load(entry);
    this.graphs.set(entry.file, loaded);
    try {
      return await loaded;
    } catch (error) {
      this.graphs.delete(entry.file);
      throw error;
    }
  }

  /** Report the events of an answer to its end. */
  private async follow(
    open: OpenChat,
    stream: AnswerStream | undefined,
    given: { readonly [name: string]: unknown },
    report: Report,
  ): Promise<boolean> {
    if (!stream) return false;
    const answer = (open.answer = { stream, name: given["answer"] });
    try {
      for (let next = await stream.next(); !next.done; next = await stream.next()) report(reported(next.value));
    } finally {
      if (open.answer === answer) open.answer = undefined;
    }
    return true;
  }
}

function reported(event: ChatEvent): ChatEvent | ReportedUpdate {
  return event.event === "AnswerUpdate" ? { ...event, spans: event.spans.filter(({ committed }) => !committed) } : event;
}

function optionsOf(given: { readonly [name: string]: unknown }): SendOptions {
  const { maxNewTokens, seed, temperature, topP, whileAway } = given as unknown as AnswerRequest;
  const sampling = present({ temperature, topP, seed: seed === undefined ? undefined : BigInt(seed) });
  return present({ maxNewTokens, whileAway, sampling: Object.keys(sampling).length ? sampling : undefined });
}

/** Return the options that are given. */
function present<T extends object>(options: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as ReturnType<typeof present<T>>;
}

function stateOf(chat: Chat): unknown {
  const { detail, late, retryInS, status } = chat.link;
  const { messages, question, storeProblem, tokens, unconfirmed } = chat;
  return { status, detail, retryInS, late, messages, unconfirmed: unconfirmed.map(markToJson), question, storeProblem, tokens };
}

function markOf(mark: unknown): ReturnType<typeof markFromJson> {
  return markFromJson(mark as SnapshotJson, (what) => new MoaError(`a mark is broken: ${what}`));
}
