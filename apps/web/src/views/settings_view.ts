/** The settings of the open chat, of new ones, and of the page. */

import type { Notice } from "../conversations.js";
import { USUAL_CHAT, type ChatSettings, type OnDisagreement, type Recommended, type Settings } from "../settings.js";
import { Sheet, button, byId, setText } from "./dom.js";

/** The values of the form. */
export interface Chosen {
  readonly settings: Settings;
  readonly chat: ChatSettings;
  readonly token: string;
}

/** The dialog with the settings. */
export class SettingsView {
  private readonly sheet = new Sheet("settings");
  private readonly form = byId<HTMLFormElement>("settings-form");
  private shown: Chosen | null = null;

  /**
   * @param current returns the present values.
   * @param recommended returns the bundle's recommended sampling; null if there is none.
   * @param switchesThinking returns whether the model's chat template can switch reasoning.
   * @param choose takes the changed values.
   * @param needsAddress returns whether to ask for the verifier's address: the page in an app is not served by a verifier.
   */
  constructor(
    private readonly current: () => Chosen,
    private readonly recommended: () => Recommended | null,
    private readonly switchesThinking: () => boolean,
    private readonly choose: (chosen: Chosen) => void,
    private readonly needsAddress: () => boolean,
  ) {
    byId("show-settings").addEventListener("click", () => this.open());
    byId("recommended").addEventListener("change", () => this.showOwn());
    byId("as-json").addEventListener("change", () => this.showOwn());
    // The values are taken in whatever way the dialog is closed.
    byId("settings").addEventListener("close", () => this.take());
  }

  open(): void {
    const { chat, settings, token } = (this.shown = this.current());
    this.field("system").value = chat.system;
    this.field("most").value = String(chat.maxNewTokens);
    this.field("temperature").value = String(chat.temperature);
    this.field("topP").value = String(chat.topP);
    this.box("recommended").checked = chat.recommended;
    this.field("thinking").value = chat.thinking ?? USUAL_CHAT.thinking; // chats of older pages have none
    this.box("asJson").checked = chat.asJson ?? false;
    this.field("schema").value = chat.schema ?? "";
    this.box("forNew").checked = false;
    this.box("origins").checked = settings.origins;
    this.box("savePower").checked = settings.savePower;
    this.box("writer").checked = settings.writer;
    this.field("onDisagreement").value = settings.onDisagreement;
    this.field("drafting").value = settings.drafting;
    this.field("address").value = settings.address;
    this.field("token").value = token;
    setText(byId("recommended-words"), recommendedWords(this.recommended()));
    byId("thinking-field").hidden = !this.switchesThinking();
    byId("address-field").hidden = !this.needsAddress();
    this.showOwn();
    this.sheet.open();
  }

  /** Show the state of the device's models. */
  showDevice({ text, actions }: Notice): void {
    setText(byId("device-words"), text);
    const box = byId("device-actions");
    const labels = actions.map(({ label }) => label).join("\n");
    if (labels === box.dataset["labels"]) return;
    box.dataset["labels"] = labels;
    box.replaceChildren(...actions.map(({ label, run }) => button(label, run)));
  }

  private take(): void {
    const before = this.shown;
    this.shown = null;
    if (before === null) return;
    const chat: ChatSettings = {
      system: this.field("system").value.trim(),
      maxNewTokens: Math.round(this.number("most", before.chat.maxNewTokens)),
      recommended: this.box("recommended").checked,
      temperature: this.number("temperature", before.chat.temperature),
      topP: this.number("topP", before.chat.topP),
      thinking: this.field("thinking").value as ChatSettings["thinking"],
      asJson: this.box("asJson").checked,
      schema: this.field("schema").value,
    };
    const settings: Settings = {
      address: this.field("address").value.trim(),
      onDisagreement: this.field("onDisagreement").value as OnDisagreement,
      drafting: this.field("drafting").value as Settings["drafting"],
      savePower: this.box("savePower").checked,
      writer: this.box("writer").checked,
      origins: this.box("origins").checked,
      chats: this.box("forNew").checked ? chat : before.settings.chats,
    };
    this.choose({ settings, chat, token: this.field("token").value.trim() });
  }

  private showOwn(): void {
    byId("own-sampling").hidden = this.box("recommended").checked;
    byId("schema-field").hidden = !this.box("asJson").checked;
  }

  /** Return the number in a field, or the value before if it is invalid. */
  private number(name: string, before: number): number {
    const field = this.field(name) as HTMLInputElement;
    return field.value !== "" && field.validity.valid ? field.valueAsNumber : before;
  }

  private field(name: string): HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement {
    return this.form.elements.namedItem(name) as HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement;
  }

  private box(name: string): HTMLInputElement {
    return this.form.elements.namedItem(name) as HTMLInputElement;
  }
}

function recommendedWords(recommended: Recommended | null): string {
  if (recommended === null) return "Choose words as recommended: always the likeliest (there is no other recommendation)";
  const { temperature, topP } = recommended;
  return `Choose words as the model's authors recommend (temperature ${temperature}, top-p ${topP})`;
}
