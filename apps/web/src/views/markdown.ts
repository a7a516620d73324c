/**
 * Answers as Markdown: markdown-it makes the HTML, without raw HTML, images and unsafe links, since an answer must load nothing.
 * The window reads the same dialect: `apps/moa_chat/desktop/markdown.py`.
 */

import MarkdownIt from "markdown-it";

// Without reference definitions, with which a later line would change what is already shown.
const MARKDOWN = new MarkdownIt("commonmark", { html: false }).enable(["table", "strikethrough"]).disable(["reference", "image"]);

const NEAR = 6; // characters of markup that may come before a character of a text that is not in the source as it is

/**
 * Return the nodes of a Markdown text.
 *
 * @param mark returns the node that stands for text from offset `from` of the source on.
 */
export function markdownNodes(source: string, from: number, mark: (text: string) => Node): Node[] {
  const template = document.createElement("template");
  template.innerHTML = MARKDOWN.render(source);
  const { content } = template;
  for (const link of content.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  if (from < source.length) {
    const walker = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
    const texts: Text[] = [];
    while (walker.nextNode()) texts.push(walker.currentNode as Text);
    let after = 0;
    for (const text of texts.filter(({ data }) => data.trim() !== "")) {
      const offsets = align(text.data, source, after);
      const first = offsets.findIndex((offset) => offset >= from);
      if (first >= 0) markFrom(text, first, mark);
      after = offsets.at(-1)! + 1;
    }
  }
  return [...content.childNodes];
}

function markFrom(text: Text, at: number, mark: (text: string) => Node): void {
  const rest = text.splitText(at);
  if (rest.data.trim() !== "") rest.replaceWith(mark(rest.data));
}

/**
 * Return for each character of a rendered text its offset in `source`, which has it from `after` on: as it is, or with markup, such
 * as `&amp;`, in between. The offsets never decrease.
 */
export function align(rendered: string, source: string, after: number): number[] {
  const whole = source.indexOf(rendered, after);
  if (whole >= 0) return Array.from({ length: rendered.length }, (_, at) => whole + at);
  let next = after;
  return Array.from(rendered.split(""), (char) => {
    const found = source.slice(next, next + NEAR).indexOf(char);
    const offset = next + Math.max(found, 0);
    if (found >= 0) next = offset + 1;
    return Math.min(offset, Math.max(source.length - 1, 0));
  });
}
