/** Counting the device's words that the target has replaced. */

import { isOfDevice, type Message } from "./message.js";

const WORD = /[\p{L}\p{N}_]+(?:['’][\p{L}\p{N}_]+)*/gu;

/**
 * Return the number of words that the device wrote and that are replaced or missing in `after`, with new ones between them. Text
 * after the end, punctuation, and words of the server do not count.
 */
export function correctedWords(written: Message, after: string): number {
  const words = [...written.content.matchAll(WORD)];
  const old = words.map((word) => word[0]);
  const now = after.match(WORD) ?? [];
  const ours = writtenHere(written);
  const mine = words.map((word) => ours.slice(word.index, word.index + word[0].length).some((each) => each));
  let count = 0;
  for (const [i1, i2, j1, j2] of differences(old, now)) {
    if (mine.slice(i1, Math.max(i2, i1 + 1)).every((each) => each)) {
      count += Math.max(i2 - i1, i2 < old.length ? j2 - j1 : 0);
    } else {
      count += mine.slice(i1, i2).filter((each) => each).length;
    }
  }
  return Math.min(count, mine.filter((each) => each).length); // the server's may be more
}

/** Return for each character whether the device wrote it without the server; true for all if no origins are known. */
function writtenHere({ content, spans }: Message): boolean[] {
  if (spans.length === 0) return new Array<boolean>(content.length).fill(true);
  return spans.flatMap(({ text, origin, committed }) =>
    new Array<boolean>(text.length).fill(isOfDevice(origin, committed)),
  );
}

/** Return stretches `[i1, i2, j1, j2]` in which `old[i1:i2]` became `now[j1:j2]`; the rest is the longest common subsequence. */
export function differences(old: readonly string[], now: readonly string[]): [number, number, number, number][] {
  const width = now.length + 1;
  const longest = new Uint32Array((old.length + 1) * width); // of old[i:] and now[j:]
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      const same = old[i] === now[j];
      longest[i * width + j] = same
        ? longest[(i + 1) * width + j + 1]! + 1
        : Math.max(longest[(i + 1) * width + j]!, longest[i * width + j + 1]!);
    }
  }
  const found: [number, number, number, number][] = [];
  let i = 0;
  let j = 0;
  while (i < old.length || j < now.length) {
    const [i1, j1] = [i, j];
    while (i < old.length || j < now.length) {
      if (i < old.length && j < now.length && old[i] === now[j]) break;
      if (j === now.length || (i < old.length && longest[(i + 1) * width + j]! >= longest[i * width + j + 1]!)) i++;
      else j++;
    }
    if (i > i1 || j > j1) found.push([i1, i, j1, j]);
    while (i < old.length && j < now.length && old[i] === now[j]) {
      i++;
      j++;
    }
  }
  return found;
}
