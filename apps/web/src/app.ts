/** The page: connects chats and connection with the views. */

import type { LinkChanged } from "@moa-edge/runtime";

import { placeOf, saveToken } from "./access.js";
import { bannerOf, deviceNotice, type BannerActions } from "./banner.js";
import type { Chats } from "./chats.js";
import { Connection } from "./connection.js";
import { Conversations } from "./conversations.js";
import { loadSettings, saveSettings, usualSettings } from "./settings.js";
import { parted } from "./message.js";
import { EXAMPLES, answersWords, asSentence, modelWords } from "./strings.js";
import { ChatsView } from "./views/chats_view.js";
import { Composer } from "./views/composer.js";
import { ConversationView } from "./views/conversation_view.js";
import { button, byId, setText } from "./views/dom.js";
import { SettingsView, type Chosen } from "./views/settings_view.js";
import { BannerView, LinkView, NoticeView, speak } from "./views/status_views.js";

const OPEN_CHAT = "open chat";
const LOOK_MS = 250; // interval of polling the link, whose waiting times are counted down

/** The page's state, and its reactions to the user. */
export class App {
  private settings = loadSettings(localStorage, usualSettings((navigator as { deviceMemory?: number }).deviceMemory));
  private postponed = false;
  private drawing = false;
  private answering = false;
  private connecting = Promise.resolve();
  private seen: LinkChanged | null = null;

  private readonly connection = new Connection(
    () => this.settings.savePower,
    () => this.changed(),
  );
  private readonly notices = new NoticeView();
  private readonly banner = new BannerView();
  private readonly link = new LinkView((offline) => void this.connection.chat?.workOffline(offline));
  private readonly composer: Composer;
  private readonly conversation: ConversationView;
  private readonly conversations: Conversations;
  private readonly settingsView: SettingsView;
  private readonly bannerActions: BannerActions = {
    retry: () => void this.start(true),
    settings: () => this.settingsView.open(),
    download: () => void this.download(),
    cancel: () => this.connection.device.cancel(),
    later: () => {
      this.postponed = true;
      this.changed();
    },
    forget: () => void this.forget(),
  };

  /** @param tab stores which chat is open, until this tab is closed. */
  constructor(
    chats: Chats,
    private token: string,
    private readonly tab: Pick<Storage, "getItem" | "setItem">,
  ) {
    const conversations = (this.conversations = new Conversations(chats, () => this.settings, {
      changed: () => this.changed(),
      tell: (notice) => this.notices.tell(notice),
      giveBack: (question) => this.composer.giveBack(question),
    }));
    this.composer = new Composer(
      (text) => {
        this.notices.hide();
        void conversations.send(text);
        requestAnimationFrame(() => this.conversation.toEnd());
      },
      () => conversations.stop(),
    );
    this.conversation = new ConversationView(
      {
        again: () => void conversations.again(),
        continueAnswer: () => void conversations.continueAnswer(),
        edit: (position) => this.edit(position),
      },
      (text) => this.notices.tell({ text, actions: [] }),
    );
    new ChatsView({
      list: (words) => chats.list(words),
      open: (id) => {
        if (id !== conversations.chat.id) this.leave();
        return conversations.open(id);
      },
      rename: (id, title) => conversations.rename(id, title),
      remove: (id) => {
        if (id === conversations.chat.id) this.leave();
        return conversations.remove(id);
      },
      current: () => conversations.chat.id,
    });
    this.settingsView = new SettingsView(
      () => ({ settings: this.settings, chat: conversations.chat.settings, token: this.token }),
      () => this.connection.talk?.recommended ?? null,
      () => this.connection.chat?.tokenizer.knowsThinking ?? false,
      (chosen) => this.choose(chosen),
      () => this.settings.address !== "" || this.connection.bundle === null,
    );
    const examples = EXAMPLES.map((question) => button(question, () => this.composer.suggest(question)));
    byId("examples").append(...examples);
    byId("new-chat").addEventListener("click", () => {
      this.leave();
      conversations.newChat();
    });
    setInterval(() => this.look(), LOOK_MS);
    document.addEventListener("visibilitychange", () => this.seenOrHidden());
  }

  /** Open the chat that this tab had open before it was loaded again. */
  async reopen(): Promise<void> {
    const id = this.tab.getItem(OPEN_CHAT);
    if (id !== null) await this.conversations.open(id);
  }

  /**
   * Connect with the present settings, and continue the answer of the page before.
   *
   * @param anew use the server's present bundle instead of the stored one.
   */
  async start(anew = false): Promise<void> {
    // One after the other: a chat that starts while another one does would find the store locked.
    this.connecting = this.connecting.then(() => this.connect(anew));
    await this.connecting;
    await this.conversations.goOn();
  }

  private async connect(anew: boolean): Promise<void> {
    let place;
    try {
      place = placeOf(location.href, this.settings.address);
    } catch (error) {
      this.connection.problem = (error as Error).message;
      this.changed();
      return;
    }
    const { drafting, writer } = this.settings;
    this.conversations.talk = null;
    await this.connection.start({ place, token: this.token, drafting, writer, anew });
    this.conversations.talk = this.connection.talk;
    const { chat } = this.connection;
    if (chat !== null && chat.storeProblem !== "") this.notices.tell({ text: asSentence(chat.storeProblem), actions: [] });
    if (this.link.wantedOffline) await chat?.workOffline(true);
  }

  /** Offer a newer version of the page. */
  offerUpdate(takeOver: () => void): void {
    const run = (): void => void this.conversations.idle().then(takeOver);
    this.notices.tell({ text: "There is a newer version of this page.", actions: [{ label: "Reload", run }] });
  }

  /** Store or refresh the chat: a phone may end a hidden page without notice, and another tab may have written meanwhile. The
   * runtime stores its own state. */
  private seenOrHidden(): void {
    if (document.visibilityState === "hidden") void this.conversations.saveNow();
    else void this.conversations.refresh();
  }

  /** Download the model, and reconnect with it when no answer is being written. */
  private async download(): Promise<void> {
    if (!(await this.connection.fetchModels())) return;
    await this.conversations.idle();
    await this.start();
  }

  /** Delete the model, and reconnect without it. */
  private async forget(): Promise<void> {
    try {
      await this.connection.device.forget();
    } catch (error) {
      const why = (error as Error).message; // for example that another tab reads it
      this.notices.tell({ text: asSentence(`the model could not be deleted, try again: ${why}`), actions: [] });
    }
    await this.start();
  }

  private choose({ chat, settings, token }: Chosen): void {
    const { address, drafting, savePower, writer } = this.settings;
    const other = settings.address !== address || settings.drafting !== drafting || settings.writer !== writer;
    const again = other || token !== this.token;
    this.settings = settings;
    saveSettings(localStorage, settings);
    void this.conversations.changeSettings(chat);
    if (savePower !== settings.savePower) this.connection.follow();
    if (token !== this.token) saveToken(token);
    this.token = token;
    if (again) void this.conversations.idle().then(() => this.start());
    this.changed();
  }

  /** Hide notices of this chat and end an edit, because another chat opens. */
  private leave(): void {
    this.composer.endEdit();
    this.notices.hide();
  }

  /** Put the last question back into the composer; its answer goes with the first new words. */
  private edit(position: number): void {
    this.composer.edit(this.conversations.messages[position]!.content, (text) => {
      void this.conversations.edit(position, text);
    });
  }

  /** Poll the link: between answers there are no events of it. */
  private look(): void {
    const link = this.connection.chat?.link ?? null;
    if (link?.status === "online" && this.seen?.status !== "online") void this.conversations.check();
    if (link !== this.seen || typeof link?.retryInS === "number") this.changed();
    this.seen = link;
  }

  /** Draw once, at the next frame. */
  private changed(): void {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  private draw(): void {
    const { connection, conversations, settings } = this;
    const link = connection.chat?.link ?? null;
    const { messages } = conversations;
    const { state } = connection.device;
    if (conversations.chat.id !== this.tab.getItem(OPEN_CHAT)) this.tab.setItem(OPEN_CHAT, conversations.chat.id);
    setText(byId("title"), conversations.chat.title || "New chat");
    this.link.show(link, connection.problem === "" ? "starting…" : "not connected");
    this.banner.show(bannerOf(connection.problem, this.link.wantedOffline ? null : link, state, this.postponed, this.bannerActions));
    this.settingsView.showDevice(deviceNotice(state, this.bannerActions));
    const { target = "", targetParameters = 0 } = connection.bundle?.manifest ?? {};
    setText(byId("model"), answersWords(target, targetParameters, connection.server));
    setText(byId("link-model"), modelWords(target, targetParameters));
    this.conversation.show(messages, conversations.busy, conversations.waiting, settings.origins);
    this.composer.show(conversations.busy && !conversations.atLimit, connection.talk !== null);
    this.sayAnswer();
  }

  /** Have screen readers say an answer when it is complete. */
  private sayAnswer(): void {
    const { busy, messages } = this.conversations;
    const last = messages.at(-1);
    if (this.answering && !busy && last?.role === "assistant") {
      speak(`Answer: ${parted(last).answer.content} ${last.remarks}`);
    }
    this.answering = busy;
  }
}
