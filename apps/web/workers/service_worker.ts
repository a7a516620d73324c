/** Serve the page's files without a network. The runtime stores the bundle itself. */

export {};

// Set by the build: files of the page, and a digest of them all.
declare const SHELL: readonly string[];
declare const ASSETS: readonly string[];
declare const VERSION: string;

declare const self: ServiceWorkerGlobalScope;

const SHELL_CACHE = `moa-edge shell ${VERSION}`;
/** Large files with a digest in their names. They are cached when they are first needed, and kept over versions. */
const ASSETS_CACHE = "moa-edge assets";

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));
self.addEventListener("message", (event) => {
  if (event.data === "take over") void self.skipWaiting();
});
self.addEventListener("fetch", (event) => {
  const name = nameOf(event.request);
  if (name === null) return; // not of the page
  event.respondWith(ASSETS.includes(name) ? fromAssets(event.request) : fromShell(name, event.request));
});

async function install(): Promise<void> {
  const cache = await caches.open(SHELL_CACHE);
  // Bypass the browser's cache, so that all files are of one build.
  await cache.addAll(SHELL.map((name) => new Request(name, { cache: "reload" })));
}

async function activate(): Promise<void> {
  for (const name of await caches.keys()) {
    if (name.startsWith("moa-edge shell") && name !== SHELL_CACHE) await caches.delete(name);
  }
  const assets = await caches.open(ASSETS_CACHE);
  for (const request of await assets.keys()) {
    if (!ASSETS.includes(nameOf(request) ?? "")) await assets.delete(request);
  }
  await self.clients.claim();
}

/** Return the name of a file of the page; null for every other request. */
function nameOf(request: Request): string | null {
  const { scope } = self.registration;
  const url = request.url.split(/[?#]/u)[0]!;
  if (request.method !== "GET" || !url.startsWith(scope)) return null;
  const name = url.slice(scope.length) || "./";
  return SHELL.includes(name) || ASSETS.includes(name) ? name : null;
}

async function fromShell(name: string, request: Request): Promise<Response> {
  const cache = await caches.open(SHELL_CACHE);
  return (await cache.match(new URL(name, self.registration.scope).href)) ?? fetch(request);
}

async function fromAssets(request: Request): Promise<Response> {
  const cache = await caches.open(ASSETS_CACHE);
  const kept = await cache.match(request.url);
  if (kept !== undefined) return kept;
  const response = await fetch(request);
  if (response.ok) await cache.put(request.url, response.clone());
  return response;
}
