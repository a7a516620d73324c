/** Helpers on token lists. */

/** How many leading items two lists share. */
export function commonLength(a: readonly number[], b: readonly number[]): number {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a[length] === b[length]) length++;
  return length;
}

/** Whether two lists hold the same. */
export function same(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && commonLength(a, b) === a.length;
}

/** Append, however many there are: a call takes no hundred thousand arguments. */
export function append<T>(list: T[], items: Iterable<T>): void {
  for (const item of items) list.push(item);
}
