/** `node:test` for engines without Node. */

const tests: [string, () => unknown][] = [];

export function test(name: string, run: () => unknown): void {
  tests.push([name, run]);
}

/**
 * Run the tests.
 *
 * @param report takes the name of each, and why it failed.
 */
export async function runTests(report: (name: string, problem: string) => void): Promise<void> {
  for (const [name, run] of tests) {
    try {
      await run();
      report(name, "");
    } catch (error) {
      report(name, `${String(error)} ${(error as Error).stack ?? ""}`);
    }
  }
}
