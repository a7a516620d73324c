/** The parts of `node:assert/strict` that the replays use, for engines without Node. */

type Expected = RegExp | (new (...given: never[]) => unknown) | undefined;

function fail(text: string): never {
  throw new Error(`assertion failed: ${text}`);
}

function shown(value: unknown): string {
  return JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? `${each}n` : each))?.slice(0, 500) ?? String(value);
}

function isEqual(one: unknown, other: unknown): boolean {
  if (Object.is(one, other)) return true;
  if (typeof one !== "object" || typeof other !== "object" || !one || !other) return false;
  if (Array.isArray(one) !== Array.isArray(other)) return false;
  const [keys, others] = [Object.keys(one), Object.keys(other)];
  if (keys.length !== others.length) return false;
  return keys.every((key) => key in other && isEqual((one as never)[key], (other as never)[key]));
}

function check(error: unknown, expected: Expected): void {
  if (expected instanceof RegExp ? !expected.test(String(error)) : expected && !(error instanceof expected)) throw error;
}

export default {
  ok(value: unknown, text = "not true"): void {
    if (!value) fail(text);
  },
  equal(one: unknown, other: unknown, text = ""): void {
    if (!Object.is(one, other)) fail(`${shown(one)} is not ${shown(other)} ${text}`);
  },
  deepEqual(one: unknown, other: unknown, text = ""): void {
    if (!isEqual(one, other)) fail(`${shown(one)} is not ${shown(other)} ${text}`);
  },
  match(text: string, expected: RegExp): void {
    if (!expected.test(text)) fail(`${shown(text)} does not match ${expected}`);
  },
  throws(action: () => unknown, expected?: Expected): void {
    try {
      action();
    } catch (error) {
      check(error, expected);
      return;
    }
    fail("nothing is thrown");
  },
  async rejects(promise: Promise<unknown>, expected?: Expected): Promise<void> {
    try {
      await promise;
    } catch (error) {
      check(error, expected);
      return;
    }
    fail("nothing is thrown");
  },
};
