/** How the link is, and the switch that cuts it. */

import type { LinkChanged } from "@moa-edge/runtime";

import { linkWords } from "../words.js";
import { byId, setText } from "./dom.js";

export class LinkView {
  private readonly box = byId("link");
  private readonly words = byId("link-words");
  /** For screen readers, which are not to hear seconds counted down. */
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

  /** @param link null while there is no chat: then `otherwise` stands there. */
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
