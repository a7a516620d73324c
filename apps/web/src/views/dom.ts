/** Finding and making elements. */


/** Return the element of the page with this id. @throws Error the page has none: a defect. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element ${id}`);
  return found as T;
}

/** Return whether a key is for an input method, such as the Enter that confirms a candidate. Safari ends the composition before
 * that key; its code says it. */
export function isForInputMethod({ isComposing, keyCode }: Pick<KeyboardEvent, "isComposing" | "keyCode">): boolean {
  return isComposing || keyCode === 229;
}

/** Return a new element with a class and children. Texts are never read as HTML. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className = "",
  ...children: readonly (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  if (className !== "") made.className = className;
  made.append(...children);
  return made;
}

/** Return a new button. @param name for screen readers, if it differs from the label. */
export function button(label: string, run: () => void, name = ""): HTMLButtonElement {
  const made = make("button", "", label);
  made.type = "button";
  if (name !== "") made.setAttribute("aria-label", name);
  made.addEventListener("click", run);
  return made;
}

/** Set a text only if it differs, so that screen readers announce changes alone. */
export function setText(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** A dialog over the whole phone. The browser keeps the focus inside, closes it by Escape, and restores the focus. */
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
