/** Sentences for the user: one that passes, one that stays, and what is only spoken. */

import type { Notice } from "../conversation/talk.js";
import { button, byId, setText } from "./dom.js";

/** What is to be done about something that just happened. The next one takes its place. */
export class NoticeView {
  private readonly box = byId("notice");
  private readonly text = byId("notice-text");
  private readonly actions = byId("notice-actions");

  tell({ text, actions }: Notice): void {
    this.box.hidden = false;
    setText(this.text, text);
    const buttons = actions.map(({ label, run }) => button(label, () => this.done(run)));
    const close = button("Close", () => this.hide(), "Close this message");
    this.actions.replaceChildren(...buttons, ...(actions.length > 1 ? [] : [close]));
  }

  hide(): void {
    this.box.hidden = true;
    setText(this.text, "");
    this.actions.replaceChildren();
  }

  private done(run: () => void): void {
    const inside = this.actions.contains(document.activeElement);
    this.hide();
    if (inside) byId("question").focus();
    run();
  }
}

/** What is so as long as it is so: a download, a page that cannot connect. */
export interface Banner extends Notice {
  /** From 0 to 1; null without. */
  readonly progress: number | null;
}

export class BannerView {
  private readonly box = byId("banner");
  private readonly text = byId("banner-text");
  private readonly bar = byId<HTMLProgressElement>("banner-progress");
  private readonly actions = byId("banner-actions");
  private labels = "";

  show(banner: Banner | null): void {
    this.box.hidden = banner === null;
    if (banner === null) return;
    setText(this.text, banner.text);
    this.bar.hidden = banner.progress === null;
    this.bar.value = banner.progress ?? 0;
    const labels = banner.actions.map(({ label }) => label).join("\n");
    if (labels === this.labels) return; // a button that is pressed stays the one that is released
    this.labels = labels;
    this.actions.replaceChildren(...banner.actions.map(({ label, run }) => button(label, run)));
  }
}

/** Have a screen reader say a text; an answer comes whole, at its end. */
export function speak(text: string): void {
  setText(byId("spoken"), text);
}
