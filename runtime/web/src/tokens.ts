/** Helpers on token lists. */

/** Return how many leading items two lists, or code units two texts, share. */
export function commonLength(a: ArrayLike<unknown>, b: ArrayLike<unknown>): number {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a[length] === b[length]) length++;
  return length;
}

/** Return whether two lists hold the same items. */
export function same(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && commonLength(a, b) === a.length;
}

/** Append any number of items: `push(...items)` fails with a hundred thousand. */
export function append<T>(list: T[], items: Iterable<T>): void {
  for (const item of items) list.push(item);
}
