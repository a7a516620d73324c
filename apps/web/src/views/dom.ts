/** Finding and making elements. */

/** The element of the page with this id. @throws Error the page has none: a defect. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element ${id}`);
  return found as T;
}

/** An element with a class and what it holds. Texts stay texts: nothing is read as HTML. */
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

/** A button. @param name what a screen reader says, where that is more than the label. */
export function button(label: string, run: () => void, name = ""): HTMLButtonElement {
  const made = make("button", "", label);
  made.type = "button";
  if (name !== "") made.setAttribute("aria-label", name);
  made.addEventListener("click", run);
  return made;
}

/** Set a text only where it is another, so that screen readers hear of changes alone. */
export function setText(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}
