/** What the browser knows of networks and of who looks, for the runtime. */

import type { Conditions } from "@moa-edge/runtime";

/** Not in every browser. */
interface Connection extends EventTarget {
  readonly saveData: boolean;
  readonly type?: string;
}

const connection = (navigator as { readonly connection?: Connection }).connection;

export class Hints {
  /**
   * @param tell what is so now.
   * @param networkChanged another network, or one again, or none.
   */
  constructor(
    private readonly savePower: () => boolean,
    private readonly tell: (conditions: Conditions) => void,
    networkChanged: () => void,
  ) {
    document.addEventListener("visibilitychange", () => this.update());
    window.addEventListener("online", networkChanged);
    window.addEventListener("offline", networkChanged);
    let type = connection?.type;
    connection?.addEventListener("change", () => {
      this.update();
      if (connection.type !== type) networkChanged(); // else it is its speed that changed
      type = connection.type;
    });
  }

  get conditions(): Conditions {
    // Whose page is behind another window on a desk wants to find the answer written.
    const phone = matchMedia("(pointer: coarse)").matches;
    return {
      background: phone && document.visibilityState === "hidden",
      lowPower: this.savePower(),
      metered: connection?.saveData ?? false,
    };
  }

  update(): void {
    this.tell(this.conditions);
  }
}
