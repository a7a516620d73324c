/** The list of chats. */

import type { Summary } from "../chats.js";
import { Sheet, button, byId, make } from "./dom.js";

/** Actions on chats. */
export interface ChatActions {
  list(words: string): Promise<Summary[]>;
  open(id: string): Promise<unknown>;
  rename(id: string, title: string): Promise<void>;
  remove(id: string): Promise<void>;
  /** Id of the open chat. */
  current(): string;
}

/** The dialog with the list of chats. */
export class ChatsView {
  private readonly sheet = new Sheet("chats");
  private readonly search = byId<HTMLInputElement>("search");
  private readonly rows = byId("rows");
  private readonly none = byId("no-chats");
  private asked = 0;

  constructor(private readonly actions: ChatActions) {
    byId("show-chats").addEventListener("click", () => void this.show());
    this.search.addEventListener("input", () => void this.refresh());
  }

  private async show(): Promise<void> {
    this.search.value = "";
    await this.refresh();
    this.sheet.open();
  }

  private async refresh(): Promise<void> {
    const asked = ++this.asked;
    const found = await this.actions.list(this.search.value);
    if (asked !== this.asked) return; // the search has changed since
    this.rows.replaceChildren(...found.map((row) => this.row(row)));
    this.none.hidden = found.length > 0;
  }

  private row(row: Summary): HTMLLIElement {
    const state = row.unconfirmed ? " · not confirmed yet" : "";
    const open = button("", () => void this.open(row.id));
    open.className = "open";
    open.append(row.title, make("span", "small", dateOf(row.updated) + state));
    open.setAttribute("aria-current", String(row.id === this.actions.current()));
    const item = make("li", "", open);
    const rename = button("Rename", () => this.edit(item, row), `Rename ${row.title}`);
    const remove = button("Delete", () => void this.remove(row.id), `Delete ${row.title}`);
    item.append(rename, remove);
    return item;
  }

  private async open(id: string): Promise<void> {
    this.sheet.close();
    await this.actions.open(id);
  }

  private async remove(id: string): Promise<void> {
    await this.actions.remove(id);
    this.sheet.close(); // the offer to undo it is on the page
  }

  private edit(item: HTMLLIElement, row: Summary): void {
    const field = make("input");
    field.value = row.title;
    field.setAttribute("aria-label", "New name of the chat");
    const save = make("button", "", "Save");
    const form = make("form", "", field, save);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.actions.rename(row.id, field.value).then(() => this.refresh());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault(); // it would close the list
      item.replaceWith(this.row(row));
    });
    item.replaceChildren(form);
    field.focus();
    field.select();
  }
}

function dateOf(milliseconds: number): string {
  const when = new Date(milliseconds);
  const today = when.toDateString() === new Date().toDateString();
  return today
    ? when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : when.toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" });
}
