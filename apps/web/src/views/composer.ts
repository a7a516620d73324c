/** The field in which a question is written. */

import { byId } from "./dom.js";

export class Composer {
  private readonly form = byId<HTMLFormElement>("composer");
  private readonly field = byId<HTMLTextAreaElement>("question");
  private readonly sendButton = byId<HTMLButtonElement>("send");
  private readonly stopButton = byId<HTMLButtonElement>("stop");

  /** What is done with the text in the place of {@link send}: it takes the place of an earlier question. */
  private replace: ((text: string) => void) | null = null;

  constructor(
    private readonly send: (text: string) => void,
    stop: () => void,
  ) {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.stopButton.addEventListener("click", stop);
    this.field.addEventListener("input", () => {
      this.grow();
      if (this.field.value === "") this.replace = null;
    });
    this.field.addEventListener("keydown", (event) => {
      // On a phone Enter breaks the line: there is a button beside it.
      const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(pointer: fine)").matches;
      if (!sends) return;
      event.preventDefault();
      this.submit();
    });
  }

  /** A question that could not be asked; what is written there already stays. */
  giveBack(text: string): void {
    if (this.field.value.trim() === "") this.field.value = text;
    this.grow();
  }

  /** Write a question anew. An empty field asks nothing, and the next text is a new question. */
  edit(text: string, replace: (text: string) => void): void {
    this.field.value = text;
    this.replace = replace;
    this.grow();
    this.field.focus();
  }

  /** The question stays as it was. */
  endEdit(): void {
    if (this.replace === null) return;
    this.field.value = "";
    this.replace = null;
    this.grow();
  }

  show(busy: boolean, ready: boolean): void {
    const hadFocus = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.sendButton.hidden = busy;
    this.stopButton.hidden = !busy;
    this.sendButton.disabled = !ready;
    if (hadFocus && document.activeElement === document.body) (busy ? this.stopButton : this.field).focus();
  }

  private submit(): void {
    const text = this.field.value;
    if (text.trim() === "" || this.sendButton.hidden || this.sendButton.disabled) return;
    const ask = this.replace ?? this.send;
    this.field.value = "";
    this.replace = null;
    this.grow();
    ask(text);
  }

  /** As high as its text, in browsers that have no field-sizing. */
  private grow(): void {
    if (CSS.supports("field-sizing", "content")) return;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }
}
