/** What a phone tells a chat. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { followApp, type Chat, type NetStateLike } from "../src/index.js";

/** A chat that takes conditions, and counts what it is told besides. */
class Told {
  conditions = { background: false, lowPower: false, metered: false };
  saved = 0;
  changes = 0;

  tellConditions(told: Partial<Told["conditions"]>): void {
    this.conditions = { background: false, lowPower: false, metered: false, ...told };
  }

  async save(): Promise<void> {
    this.saved++;
  }

  async networkChanged(): Promise<void> {
    this.changes++;
  }
}

class Phone {
  tellState: (state: string) => void = () => undefined;
  tellNetwork: (state: NetStateLike) => void = () => undefined;
  readonly appState = {
    addEventListener: (_: "change", listener: (state: string) => void) => {
      this.tellState = listener;
      return { remove: () => undefined };
    },
  };
  readonly netInfo = {
    addEventListener: (listener: (state: NetStateLike) => void) => {
      this.tellNetwork = listener;
      return () => undefined;
    },
  };
}

test("follow: conditions that the app tells itself stay", () => {
  const [chat, phone] = [new Told(), new Phone()];
  followApp(chat as unknown as Chat, phone.appState, phone.netInfo, true);
  chat.tellConditions({ ...chat.conditions, lowPower: true });
  phone.tellState("background");
  assert.deepEqual(chat.conditions, { background: true, lowPower: true, metered: false });
  phone.tellNetwork({ type: "cellular", isConnected: true, details: { isConnectionExpensive: true } });
  phone.tellState("active");
  assert.deepEqual(chat.conditions, { background: false, lowPower: true, metered: true });
});

test("follow: an app without focus is not in the background", () => {
  const [chat, phone] = [new Told(), new Phone()];
  followApp(chat as unknown as Chat, phone.appState);
  phone.tellState("inactive"); // iOS, under a call or the control centre, and on the way to the background
  assert.deepEqual([chat.conditions.background, chat.saved], [false, 0]);
  phone.tellState("background");
  phone.tellState("inactive");
  assert.deepEqual([chat.conditions.background, chat.saved], [false, 1]);
});
