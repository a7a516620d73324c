/** Byte-pair merges, in time that grows hardly faster than the word: a page is not to stand still while a text is pasted. */

/**
 * Join the parts of a word: always the pair that was learnt first, of equal pairs the leftmost, until none is left.
 *
 * @param word its parts as they are at first.
 * @param rankOf when a pair was learnt, from 0 on; undefined for no pair.
 */
export function merged(word: readonly string[], rankOf: (left: string, right: string) => number | undefined): string[] {
  const count = word.length;
  const parts: (string | undefined)[] = [...word]; // undefined where a part was joined to the one before
  const next = word.map((_, at) => at + 1);
  const before = word.map((_, at) => at - 1);
  const waiting = new Heap(); // pairs, by rank and then by place; those that are no longer there stay until their turn
  const rankAt = (at: number): number | undefined => {
    const [left, right] = [parts[at], parts[next[at]!]];
    return left === undefined || right === undefined ? undefined : rankOf(left, right);
  };
  const consider = (at: number): void => {
    const rank = rankAt(at);
    if (rank !== undefined) waiting.push(rank * count + at);
  };
  for (let at = 0; at < count; at++) consider(at);
  for (let first = waiting.pop(); first !== undefined; first = waiting.pop()) {
    const at = first % count;
    if (rankAt(at) !== (first - at) / count) continue; // one of the two was joined to another meanwhile
    const right = next[at]!;
    parts[at] = parts[at]! + parts[right]!;
    parts[right] = undefined;
    next[at] = next[right]!;
    before[next[at]!] = at;
    consider(at);
    consider(before[at]!);
  }
  return parts.filter((part) => part !== undefined);
}

/** Numbers, the least of which comes first. */
class Heap {
  private readonly numbers: number[] = [];

  push(number: number): void {
    const { numbers } = this;
    let at = numbers.push(number) - 1;
    for (let above = (at - 1) >> 1; at > 0 && numbers[above]! > number; above = (at - 1) >> 1) {
      numbers[at] = numbers[above]!;
      at = above;
    }
    numbers[at] = number;
  }

  pop(): number | undefined {
    const { numbers } = this;
    const least = numbers[0];
    const last = numbers.pop();
    if (last === undefined || !numbers.length) return least;
    let at = 0;
    for (let below = 1; below < numbers.length; below = 2 * at + 1) {
      if (below + 1 < numbers.length && numbers[below + 1]! < numbers[below]!) below++;
      if (numbers[below]! >= last) break;
      numbers[at] = numbers[below]!;
      at = below;
    }
    numbers[at] = last;
    return least;
  }
}
