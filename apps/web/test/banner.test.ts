/** The sentence at the top, and its buttons. */

import assert from "node:assert/strict";
import { test } from "node:test";

import type { LinkChanged } from "@moa-edge/runtime";

import { bannerOf, type BannerActions } from "../src/banner.js";
import type { DeviceState } from "../src/device.js";

const pressed: string[] = [];
const ACTIONS = Object.fromEntries(
  ["retry", "settings", "download", "cancel", "later", "forget"].map((name) => [name, () => pressed.push(name)]),
) as unknown as BannerActions;
const ONLINE: LinkChanged = { event: "LinkChanged", status: "online", detail: "", retryInS: null, late: false };
const READY: DeviceState = { kind: "ready", bytes: 1, writes: true };

function said(problem: string, link: LinkChanged | null, device: DeviceState, postponed = false): string | null {
  const banner = bannerOf(problem, link, device, postponed, ACTIONS);
  return banner && `${banner.text} [${banner.actions.map(({ label }) => label).join("] [")}]`;
}

test("what keeps the page from working comes first", () => {
  const refused = { ...ONLINE, status: "offline", detail: "the verifier refused the token; check it" } as const;
  assert.equal(said("No network.", null, READY), "No network. [Try again] [Settings]");
  assert.equal(said("", refused, READY), "The server refused the token; check it. [Settings] [Try again]");
  assert.equal(said("", { ...refused, retryInS: 3 }, READY), null); // it tries again by itself
  assert.equal(said("", ONLINE, READY), null);
});

test("a model that is not here is offered with its size, once", () => {
  const absent: DeviceState = { kind: "absent", bytes: 147_900_000, writes: true };
  assert.match(said("", ONLINE, absent)!, /write on without a network once it has a model of 148 MB.*\[Download 148 MB\] \[Not now\]/u);
  assert.equal(said("", ONLINE, absent, true), null);
});

test("a download says how far it is, can be ended, and goes on", () => {
  const device: DeviceState = { kind: "downloading", received: 12_300_000, total: 49_200_000, toGoS: null };
  const banner = bannerOf("", ONLINE, device, true, ACTIONS)!;
  assert.equal(banner.text, "Downloading the model: 12.3 MB of 49.2 MB.");
  assert.equal(said("", ONLINE, { ...device, toGoS: 11.2 }), "Downloading the model: 12.3 MB of 49.2 MB, 12 s to go. [Cancel]");
  assert.equal(banner.progress, 0.25);
  banner.actions[0]!.run();
  assert.equal(pressed.at(-1), "cancel");
  const stopped: DeviceState = { ...device, kind: "stopped", why: "the network is gone" };
  assert.match(said("", ONLINE, stopped)!, /^The network is gone. 12.3 MB of 49.2 MB .*\[Go on\] \[Not now\]$/u);
});

test("a page that can keep nothing says why", () => {
  const device: DeviceState = { kind: "unable", why: "This page came over plain http." };
  assert.equal(said("", ONLINE, device), "This page came over plain http. [Understood]");
  assert.equal(said("", ONLINE, device, true), null);
});
