/** The field in which a question is written. */

import { byId, isForInputMethod } from "./dom.js";

/** The field, and its buttons Send and Stop. */
export class Composer {
  private readonly form = byId<HTMLFormElement>("composer");
  private readonly field = byId<HTMLTextAreaElement>("question");
  private readonly sendButton = byId<HTMLButtonElement>("send");
  private readonly stopButton = byId<HTMLButtonElement>("stop");

  /** Called with the text in place of {@link send} if it replaces an earlier question. */
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
      const sends = event.key === "Enter" && !event.shiftKey && !isForInputMethod(event) && matchMedia("(pointer: fine)").matches;
      if (!sends) return;
      event.preventDefault();
      this.submit();
    });
  }

  /** Take back a question that could not be asked, unless there is another text. */
  giveBack(text: string): void {
    if (this.field.value.trim() === "") this.field.value = text;
    this.grow();
  }

  /** Begin with a question that the user may change. */
  suggest(text: string): void {
    this.giveBack(text);
    this.field.focus();
  }

  /** Edit an earlier question. Emptying the field ends the edit. */
  edit(text: string, replace: (text: string) => void): void {
    this.field.value = text;
    this.replace = replace;
    this.grow();
    this.field.focus();
  }

  /** End an edit; the question stays as it was. */
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

  /** Make the field as high as its text, in browsers without field-sizing. */
  private grow(): void {
    if (CSS.supports("field-sizing", "content")) return;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }
}
