/** The end of something, to wait for beside other promises. */

import type { Host } from "./host.js";

/** An event that occurs once, or never. */
export class Ending {
  private over = false;
  private readonly waiting = new Set<() => void>();

  /** Whether it has occurred. */
  get ended(): boolean {
    return this.over;
  }

  /** Let it occur. */
  end(): void {
    this.over = true;
    for (const told of this.waiting) told();
    this.waiting.clear();
  }

  /** Wait for it. */
  async come(): Promise<void> {
    await this.before(new Promise(() => undefined));
  }

  /**
   * Wait for `something`, which is not cancelled, or for the end; return whether it was done first.
   *
   * @throws the error of `something`.
   */
  async before(something: Promise<unknown>): Promise<boolean> {
    if (this.over) return false;
    let told = (): void => undefined;
    const ended = new Promise<boolean>((resolve) => (told = () => resolve(false)));
    this.waiting.add(told);
    try {
      return await Promise.race([something.then(() => true), ended]);
    } finally {
      this.waiting.delete(told);
    }
  }

  /** Wait for `seconds`, or for the end; return whether they passed first. */
  async sleep(host: Host, seconds: number): Promise<boolean> {
    let wake = (): void => undefined;
    const slept = new Promise<void>((resolve) => (wake = resolve));
    const cancel = host.later(seconds, wake);
    try {
      return await this.before(slept);
    } finally {
      cancel();
    }
  }
}
