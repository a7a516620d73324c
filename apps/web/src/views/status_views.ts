/** The link's state, notices, the banner, and text for screen readers. */

import type { LinkChanged } from "@moa-edge/runtime";

import type { Notice } from "../conversations.js";
import { linkWords } from "../strings.js";
import { button, byId, setText } from "./dom.js";

/** The link's state, and the switch that cuts it. */
export class LinkView {
  private readonly box = byId("link");
  private readonly words = byId("link-words");
  /** For screen readers, without the seconds that are counted down. */
  private readonly status = byId("link-status");
  private readonly toggle = byId<HTMLInputElement>("offline");
  private seen: LinkChanged | null = null;
  private since = 0;

  constructor(workOffline: (offline: boolean) => void) {
    this.toggle.addEventListener("change", () => workOffline(this.toggle.checked));
  }

  get wantedOffline(): boolean {
    return this.toggle.checked;
  }

  /** Show the link, or `otherwise` if it is null, because there is no chat. */
  show(link: LinkChanged | null, otherwise: string): void {
    this.toggle.disabled = link === null;
    if (link === null) {
      this.box.dataset["state"] = "starting";
      setText(this.words, otherwise);
      setText(this.status, otherwise);
      return;
    }
    if (link !== this.seen) {
      this.seen = link;
      this.since = performance.now();
    }
    const passed = (performance.now() - this.since) / 1000;
    const left = link.retryInS === null ? null : Math.max(0, link.retryInS - passed);
    const words = linkWords(link, left, this.wantedOffline);
    this.box.dataset["state"] = words === "slow" ? "slow" : this.wantedOffline ? "offline" : link.status;
    this.box.title = this.wantedOffline ? "" : link.detail;
    setText(this.words, words);
    setText(this.status, linkWords(link, null, this.wantedOffline));
  }
}

/** A notice of something that just happened, with actions. The next notice replaces it. */
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

/** A notice of a lasting state: a download, a page that cannot connect. */
export interface Banner extends Notice {
  /** Progress from 0 to 1; null for none. */
  readonly progress: number | null;
}

/** The banner at the top of the page. */
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
    if (labels === this.labels) return; // keep the button that is being pressed
    this.labels = labels;
    this.actions.replaceChildren(...banner.actions.map(({ label, run }) => button(label, run)));
  }
}

/** Have screen readers say a text. */
export function speak(text: string): void {
  setText(byId("spoken"), text);
}
