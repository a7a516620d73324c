/** Connections: opened, watched, given up and made again, by a clock that jumps. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { fromBinary } from "@bufbuild/protobuf";
import { WebSocket } from "ws";

import { connectError } from "../src/connection.js";
import { Driver } from "../src/driver.js";
import { Address, ClientSession, DraftingLoop, Endpoint, FixedShape, USUAL_TIMING, budgetOf, wire } from "../src/index.js";
import type { Answered, Conditions, ConnectError, LinkChanged, Timing } from "../src/index.js";
import { nodeHost } from "../src/node/index.js";
import { FakeHost } from "./fake_host.js";
import { ToyVerifier, send } from "./toy_verifier.js";
import { read } from "./vectors.js";

const USUAL: Conditions = { background: false, lowPower: false, metered: false };

const SESSION_ID = "0123456789abcdef0123456789abcdef";

/** A driver without a drafter, and what it told. */
class World {
  readonly problems: ConnectError[] = [];
  readonly changes: LinkChanged[] = [];
  rests = 0;
  /** What each Hello waits for. */
  store: () => Promise<void> | undefined = () => undefined;
  readonly loop: DraftingLoop;
  readonly driver: Driver;
  private readonly running: Promise<void>;

  constructor(
    readonly host = new FakeHost(),
    timing: Timing = USUAL_TIMING,
  ) {
    const session = new ClientSession({ target: "t", tokenizer: "t", drafter: "" }, { stopTokens: [2], vocabSize: 512 });
    this.loop = new DraftingLoop(session, undefined, new FixedShape(budgetOf(4, 4)));
    this.loop.listen((event) => event.event === "LinkChanged" && this.changes.push(event));
    this.driver = new Driver(this.loop, new Endpoint("ws://verifier:8765"), SESSION_ID, timing, host, {
      problem: (error) => this.problems.push(error),
      rest: () => this.rests++,
      store: () => this.store(),
    });
    this.driver.goOnline();
    this.running = this.driver.run();
  }

  get status(): string {
    return this.loop.link.status;
  }

  async end(): Promise<void> {
    const closing = this.driver.close();
    await this.host.pass(2);
    await closing;
    await this.running;
  }
}

function link(name: string, live: (world: World) => Promise<void>): void {
  test(`link: ${name}`, async () => {
    const world = new World();
    await live(world);
    await world.end();
  });
}

function cases({ sent }: { sent: readonly Uint8Array[] }): (string | undefined)[] {
  return sent.map((frame) => fromBinary(wire.ClientMessageSchema, frame).event.case);
}

link("a Hello, a Welcome, and it is online", async ({ changes, host }) => {
  new ToyVerifier(host);
  await host.pass(1);
  assert.deepEqual(changes.map(({ status }) => status), ["reconnecting", "online"]);
  assert.deepEqual(cases(host.socket), ["hello"]);
  assert.equal(host.socket.address, `ws://verifier:8765/v1/session?x-session-id=${SESSION_ID}`);
  assert.equal(host.socket.binaryType, "arraybuffer");
});

link("a frame that arrives during a draft has the time of its arrival", async ({ driver, host, loop }) => {
  new ToyVerifier(host);
  await host.pass(1);
  const told: number[] = [];
  const tree = { tokens: [], parents: [], scores: [], steps: [] };
  const propose = (): Promise<typeof tree> => new Promise((resolve) => host.later(1, () => resolve(tree)));
  const next = loop.next.bind(loop);
  loop.next = () => {
    loop.next = next;
    return { todo: "draft", by: { propose }, prefix: [1], budget: budgetOf(1, 1), origin: "drafted", sampling: {} } as never;
  };
  loop.drafted = () => undefined;
  loop.received = (_, now) => told.push(now);
  driver.post(() => undefined);
  await host.pass(0.25);
  const arrived = host.now();
  host.socket.says(new Uint8Array());
  await host.pass(2);
  assert.deepEqual(told, [arrived]);
});

link("attempts come less and less often, and each says why there is no connection", async ({ host, problems }) => {
  host.onsocket = (socket) => socket.dies();
  await host.pass(0.2);
  const counts: number[] = [];
  for (const seconds of [0.25, 0.5, 1, 2, 4, 4]) {
    await host.pass(seconds);
    counts.push(host.sockets.length);
  }
  assert.deepEqual(counts, [2, 3, 4, 5, 6, 7]);
  assert.equal(problems[0]!.message, "no verifier answers at ws://verifier:8765/v1/session; start one with moa-serve");
  assert.equal(problems[0]!.final, false);
});

link("a defect is told with its name, and connecting works again when it is wanted", async ({ driver, host, problems, loop }) => {
  host.answer = () => {
    throw new RangeError("a defect");
  };
  host.onsocket = (socket) => socket.dies();
  await host.pass(60);
  assert.equal(problems.length, 1);
  assert.match(problems[0]!.message, /^the connection to ws:.* failed unexpectedly: RangeError: a defect$/);
  assert.ok(problems[0]!.final && problems[0]!.cause instanceof RangeError && driver.gaveUp);
  assert.deepEqual([loop.link.status, loop.link.retryInS], ["offline", null]);
  new ToyVerifier(host);
  driver.goOnline();
  await host.pass(1);
  assert.equal(loop.link.status, "online");
});

link("what does not open in time is given up", async ({ changes, host, problems }) => {
  await host.pass(5.1);
  assert.match(problems[0]!.message, /^nothing answers at .* within 5 s: a verifier may still be starting$/);
  assert.ok(host.sockets[0]!.left);
  assert.deepEqual(changes.at(-1), { event: "LinkChanged", status: "offline", detail: problems[0]!.message, retryInS: 0.25, late: false });
});

link("who never welcomes is no verifier", async ({ host, problems }) => {
  host.onsocket = (socket) => socket.opens();
  await host.pass(20.1);
  assert.match(problems[0]!.message, /has not answered the Hello within 20 s: is it a moa-edge verifier\?$/);
  assert.ok(host.sockets[0]!.left);
  assert.deepEqual(cases(host.sockets[0]!), ["hello"]); // and no ping before the Welcome
});

link("a silent link is asked for a sign of life, and given up without one", async (world) => {
  const { host, problems } = world;
  const verifier = new ToyVerifier(host);
  await host.pass(60);
  assert.equal(host.sockets.length, 1);
  assert.equal(cases(host.socket).filter((name) => name === "ping").length, 14); // one every 4 s
  verifier.answers = false;
  const since = host.now();
  while (!problems.length) await host.pass(0.1);
  assert.match(problems[0]!.message, /^nothing came from .* for a while$/);
  assert.ok(host.now() - since < 8.2);
  verifier.answers = true;
  await host.pass(1);
  assert.equal(world.status, "online");
});

link("a page that was frozen asks once more before it gives up a link", async (world) => {
  const { host } = world;
  new ToyVerifier(host);
  await host.pass(1);
  await host.freeze(3600);
  await host.pass(20);
  assert.equal(host.sockets.length, 1);
  assert.equal(world.status, "online");
});

link("a page that was frozen finds a dead link within the ping's time", async (world) => {
  const { host } = world;
  const verifier = new ToyVerifier(host);
  await host.pass(5.5); // a ping is on its way
  verifier.answers = false;
  await host.freeze(3600);
  await host.pass(9);
  assert.equal(host.sockets.length, 2);
});

link("in the background no ping is sent, and a link that closes is made again after it", async (world) => {
  const { driver, host } = world;
  new ToyVerifier(host);
  await host.pass(1);
  driver.tellConditions({ ...USUAL, background: true });
  await host.pass(100);
  assert.deepEqual(cases(host.socket), ["hello"]);
  host.socket.dies();
  await host.pass(100);
  assert.equal(host.sockets.length, 1);
  assert.equal(world.loop.link.detail, "no connection is made in the background");
  assert.equal(world.rests, 1);
  driver.tellConditions(USUAL);
  await host.pass(0.1);
  assert.equal(world.status, "online");
});

link("behind the background a link is asked at once whether it lives", async ({ driver, host }) => {
  new ToyVerifier(host);
  await host.pass(1);
  driver.tellConditions({ ...USUAL, background: true });
  await host.pass(100);
  driver.tellConditions(USUAL);
  await host.pass(0);
  assert.deepEqual(cases(host.socket), ["hello", "ping"]);
});

link("another network is used at once, and the old link is not waited for", async ({ changes, driver, host }) => {
  new ToyVerifier(host);
  await host.pass(1);
  const done = driver.reconnect();
  await host.pass(0.1);
  await done;
  assert.equal(host.sockets.length, 2);
  assert.ok(host.sockets[0]!.left);
  assert.deepEqual(changes.slice(2).map(({ detail, status }) => [status, detail]), [
    ["offline", "the network changed"],
    ["reconnecting", "a connection to the server is being made"],
    ["online", "connected to the server"],
  ]);
});

link("the next link waits for the end of the one before, a second at most", async (world) => {
  const { driver, host } = world;
  new ToyVerifier(host);
  await host.pass(1);
  const leaving = driver.goOffline();
  driver.goOnline();
  await host.pass(0.9);
  assert.equal(host.sockets.length, 1);
  await host.pass(0.2);
  assert.equal(host.sockets.length, 2);
  await leaving;
  assert.equal(world.status, "online");
});

link("a Hello waits until its count of connections is stored", async (world) => {
  const { host } = world;
  new ToyVerifier(host);
  let stored = (): void => undefined;
  world.store = () => new Promise((resolve) => (stored = resolve));
  await host.pass(3);
  assert.deepEqual(cases(host.socket), []);
  stored();
  await host.pass(1);
  assert.deepEqual(cases(host.socket), ["hello"]);
  assert.equal(world.status, "online");
});

link("a refusal that trying again cannot mend is the last word until the user says so", async (world) => {
  const { driver, host, loop } = world;
  host.onsocket = (socket) => socket.opens();
  await host.pass(1);
  const value = { code: wire.FaultCode.REPLACED, text: "another connection continued this conversation" };
  send(host.socket, { case: "fault", value });
  await host.pass(60);
  assert.equal(host.sockets.length, 1);
  assert.ok(driver.gaveUp);
  assert.deepEqual([loop.link.status, loop.link.detail, loop.link.retryInS], ["offline", value.text, null]);
  new ToyVerifier(host);
  driver.goOnline();
  await host.pass(1);
  assert.equal(world.status, "online");
  assert.ok(!driver.gaveUp);
});

link("what comes before the end of a link is heard, also where sending fails", async ({ driver, host, loop, problems }) => {
  host.onsocket = (socket) => {
    socket.onsent = () => {
      throw new Error("the connection is lost");
    };
    socket.opens();
  };
  await host.pass(1);
  const value = { code: wire.FaultCode.REPLACED, text: "another connection continued this conversation" };
  send(host.socket, { case: "fault", value });
  host.socket.dies();
  await host.pass(60);
  assert.deepEqual([loop.link.status, loop.link.detail, host.sockets.length], ["offline", value.text, 1]);
  assert.ok(driver.gaveUp);
  assert.deepEqual(problems, []);
});

link("a metered network is told by a new connection", async ({ driver, host }) => {
  const { hellos } = new ToyVerifier(host);
  await host.pass(1);
  driver.tellConditions({ ...USUAL, metered: true });
  await host.pass(1);
  assert.deepEqual(hellos.map(({ rowEncoding }) => wire.RowEncoding[rowEncoding]), ["INT8", "UNSPECIFIED"]);
});

link("a frame far too large closes the link", async ({ host, problems }) => {
  host.onsocket = (socket) => socket.opens();
  await host.pass(1);
  host.socket.says(new Uint8Array((4 << 20) + 1));
  await host.pass(0.1);
  assert.equal(problems[0]!.message, `the verifier sent a frame of ${(4 << 20) + 1} bytes`);
});

test("link: what comes faster than it is taken up closes the link", async () => {
  const world = new World();
  const { driver, host } = world;
  new ToyVerifier(host);
  await host.pass(1);
  const socket = host.socket;
  for (let count = 0; count < 5; count++) socket.says(new Uint8Array(4 << 20)); // and the driver has had no turn
  await host.pass(0.1);
  assert.equal(world.problems.at(-1)!.message, "frames came faster than this device takes them up");
  assert.ok(driver.bytesMoved[1] > 20 << 20);
  await world.end();
});

// -- why there is no connection ------------------------------------------------------------------------

const STATUS = "/v1/status";
type Answers = (url: string, token: string, readable: boolean) => Answered | undefined;

function said(status: number, elsewhere = false): Answers {
  return (url) => (url.endsWith(STATUS) ? { status, elsewhere } : undefined);
}

const PAGE = "https://app.example";
const nobody: Answers = () => undefined;
/** What may not be read, but is there. */
const hidden: Answers = (url, token, readable) =>
  !readable && !token && url === "https://v/healthz" ? { status: 0, elsewhere: false } : undefined;
const WHY: [string, string, string | undefined, Answers, string, boolean][] = [
  ["a token that is refused", "ws://v:1", undefined, said(401), "the verifier at ADDRESS refused the token; check it", true],
  [
    "a host that is not allowed",
    "ws://v:1",
    undefined,
    said(421),
    "the verifier behind ADDRESS does not answer for this host: its moa-serve needs --allow-host NAME",
    true,
  ],
  ["a verifier that is full", "ws://v:1", undefined, said(503), "the verifier at ADDRESS is full or shutting down", false],
  ["another server", "ws://v:1", undefined, said(404), "ADDRESS answered HTTP 404: check that this is a moa-edge verifier's address", true],
  ["a server in trouble", "ws://v:1", undefined, said(502), "ADDRESS answered HTTP 502: check that this is a moa-edge verifier's address", false],
  [
    "a redirect",
    "ws://v:1",
    undefined,
    said(0, true),
    "ADDRESS sends its clients elsewhere, which is not followed: name the verifier's own address",
    true,
  ],
  [
    "a proxy without WebSockets",
    "ws://v:1",
    undefined,
    said(200),
    "what answers at ADDRESS takes requests, but no WebSocket: a proxy between may have to let it through",
    false,
  ],
  ["nobody", "ws://v:1", "http://app.example", nobody, "no verifier answers at ADDRESS; start one with moa-serve", false],
  [
    "nobody by TLS",
    "wss://v",
    PAGE,
    nobody,
    "no verifier answers at ADDRESS; start one with moa-serve; if one runs there, open https://v/healthz to see whether its " +
      "certificate is trusted",
    false,
  ],
  [
    "an origin that is not let in",
    "wss://v",
    PAGE,
    hidden,
    `what answers at ADDRESS does not let web pages of ${PAGE} connect: start moa-serve with --allow-origin ${PAGE}`,
    false,
  ],
  [
    "a secure page and an open link",
    "ws://v:1",
    PAGE,
    said(200),
    "a page that came over https may connect by wss:// only, not to ADDRESS: start moa-serve with --tls-cert and --tls-key, " +
      "and use wss://",
    true,
  ],
  ["the same on this machine", "ws://localhost:1", PAGE, nobody, "no verifier answers at ADDRESS; start one with moa-serve", false],
];

for (const [name, url, origin, answers, sentence, final] of WHY) {
  test(`link: what is said of ${name}`, async () => {
    const host = new FakeHost(origin);
    host.answer = answers;
    const endpoint = new Endpoint(url, "secret");
    const error = await connectError(endpoint, host, 5);
    assert.equal(error.message, sentence.replace("ADDRESS", endpoint.address));
    assert.equal(error.final, final);
  });
}

test("link: what is said where no token is given", async () => {
  const host = new FakeHost();
  host.answer = said(401);
  const endpoint = new Endpoint("ws://v:1");
  const error = await connectError(endpoint, host, 5);
  assert.equal(error.message, `the verifier at ${endpoint.address} asks for a token, and none is given`);
  assert.equal(error.final, true);
});

test("link: a program without anything else to do waits for an answer that never comes", () => {
  const program = `
    import { nodeHost } from ${JSON.stringify(new URL("../src/node/index.js", import.meta.url).href)};
    // As Node's, where a connection breaks before it is looked at.
    globalThis.fetch = (_, { signal }) => new Promise((_, refuse) => signal.addEventListener("abort", refuse));
    console.log(await nodeHost(class {}).ask("http://v", "", true, 0.1));
  `;
  assert.equal(execFileSync(process.execPath, ["--input-type=module", "-e", program], { encoding: "utf-8" }), "undefined\n");
});

// -- addresses -----------------------------------------------------------------------------------------

test("link: addresses", () => {
  const cases = read<{ url: string; scheme: string; session: string; request: string; raises?: string }>("texts/addresses");
  for (const { url, scheme, session, request, raises } of cases) {
    const parsed = Address.parse(url, scheme);
    assert.deepEqual([parsed?.session, parsed?.at("/x")], raises ? [undefined, undefined] : [session, request], url);
  }
  const [here, away] = [new Endpoint("http://[::1]:99/moa/v1/session?a=b#c"), new Endpoint("HTTPS://Host.example")];
  assert.deepEqual([here.address, here.at("/x"), here.onThisMachine], ["ws://[::1]:99/moa/v1/session", "http://[::1]:99/moa/x", true]);
  assert.ok(!away.onThisMachine);
  for (const url of ["", "ws://user:word@host"]) {
    const expected = { message: `${JSON.stringify(url)} is no verifier address: expected ws://HOST:PORT`, final: true };
    assert.throws(() => new Endpoint(url), expected);
  }
});

test("link: a token is a subprotocol", () => {
  assert.deepEqual(new Endpoint("ws://host").protocols, []);
  assert.deepEqual(new Endpoint("ws://host", "sekret?\u00e9~").protocols, ["moa.v1", "moa.bearer.c2VrcmV0P8Opfg"]);
});

test("link: a token that no header takes is refused as any other", async () => {
  const server = createServer((request, response) => response.writeHead(request.headers.authorization ? 200 : 401).end());
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = `ws://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const host = { ...nodeHost(WebSocket), origin: "http://127.0.0.1" };
  for (const token of ["a\nb", "\u{1f600}", "\u0000"]) {
    const { message } = await connectError(new Endpoint(url, token), host, 5);
    assert.equal(message, `the verifier at ${url}/v1/session refused the token; check it`);
  }
  server.closeAllConnections();
  server.close();
});
