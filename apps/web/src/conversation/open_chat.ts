/** The open conversation: shown, stored, with settings of its own. Asks nothing. */

import type { Answering } from "../answers/answering.js";
import { newChat, type Chats, type StoredChat } from "../chats/chats.js";
import { settled, type Message } from "../chats/message.js";
import type { ChatSettings, Settings } from "../settings.js";
import { asSentence } from "../words.js";
import type { Host } from "./talk.js";

export class OpenChat {
  /** The open one; not stored before its first question. */
  chat: StoredChat;
  /** What is being written, perhaps in another chat. */
  answering: Answering | null = null;
  /** The chat that {@link answering} is, or was last, written in. */
  protected answered: StoredChat;

  /** @param settings those of the page, as they are now. */
  constructor(
    protected readonly chats: Chats,
    protected readonly settings: () => Settings,
    protected readonly host: Host,
  ) {
    this.chat = this.answered = newChat(settings().chats);
  }

  /** Of the open chat, with the answer that is being written. */
  get messages(): readonly Message[] {
    const { answering, chat } = this;
    return answering?.place.chat === chat.id ? answering.shownIn(chat.messages) : chat.messages;
  }

  /** It is stored with its first question. */
  newChat(): void {
    this.chat = newChat(this.settings().chats);
    this.host.changed();
  }

  /** @returns whether it is there. */
  async open(id: string): Promise<boolean> {
    const chat = await this.one(id);
    if (chat === null) return false;
    this.chat = chat;
    const last = chat.messages.at(-1);
    if (this.answering?.place.chat !== id && last?.role === "user") {
      // The page ended before there was an answer.
      this.host.giveBack(last.content);
      chat.messages = chat.messages.slice(0, -1);
    }
    this.host.changed();
    return true;
  }

  /** They count from the open chat's next question on. */
  async changeSettings(settings: ChatSettings): Promise<void> {
    const { chat } = this;
    chat.settings = settings;
    await this.refresh();
    if (chat.messages.length > 0) await this.store(chat);
  }

  /** Take over what another tab has written in the open chat since. */
  async refresh(): Promise<void> {
    const { chat } = this;
    if (chat.messages.length === 0) return;
    const stored = await this.attempt(() => this.chats.get(chat.id), null);
    if (stored === null || stored.updated <= chat.updated || this.answering?.place.chat === chat.id) return;
    chat.title = stored.title;
    chat.updated = stored.updated;
    chat.messages = stored.messages.map(settled);
    this.host.changed();
  }

  async rename(id: string, title: string): Promise<void> {
    await this.refresh();
    const chat = await this.one(id);
    if (chat === null || title.trim() === "") return;
    chat.title = title.trim();
    await this.store(chat);
    this.host.changed();
  }

  /** The user may take that back. */
  async remove(id: string): Promise<void> {
    const chat = await this.one(id);
    if (chat === null) return;
    await this.attempt(() => this.chats.remove(id), undefined);
    if (this.chat.id === id) this.newChat();
    const undo = async (): Promise<void> => {
      await this.store(chat);
      await this.open(id);
    };
    this.host.tell({ text: "The chat was deleted.", actions: [{ label: "Undo", run: () => void undo() }] });
    this.host.changed();
  }

  /** A chat, the one object of it that is in use where there is one; null where it is not stored. */
  protected async one(id: string): Promise<StoredChat | null> {
    if (id === this.chat.id) return this.chat;
    if (this.answering?.place.chat === id) return this.answered;
    const stored = await this.attempt(() => this.chats.get(id), null);
    return stored && { ...stored, messages: stored.messages.map(settled) };
  }

  protected store(chat: StoredChat): Promise<void> {
    return this.attempt(() => this.chats.put(chat), undefined);
  }

  /** What cannot be stored or read is said, and the chat goes on. */
  protected async attempt<T>(does: () => Promise<T>, otherwise: T): Promise<T> {
    try {
      return await does();
    } catch (error) {
      this.host.tell({ text: asSentence((error as Error).message), actions: [] });
      return otherwise;
    }
  }
}
