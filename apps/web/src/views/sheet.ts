/** A dialog over the whole phone. The browser keeps the focus inside, closes it by Escape, and gives the focus back. */

import { byId } from "./dom.js";

export class Sheet {
  private readonly dialog: HTMLDialogElement;

  constructor(id: string) {
    this.dialog = byId<HTMLDialogElement>(id);
    this.dialog.querySelector(".close")!.addEventListener("click", () => this.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.close(); // beside it, on a wide screen
    });
  }

  open(): void {
    this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  close(): void {
    this.dialog.close();
  }
}
