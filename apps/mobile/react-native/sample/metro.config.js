const { resolve } = require("node:path");
const { getDefaultConfig, mergeConfig } = require("@react-native/metro-config");

// The package lies beside the sample; an app that installs what npm packs needs no watchFolders.
module.exports = mergeConfig(getDefaultConfig(__dirname), {
  watchFolders: [resolve(__dirname, "..")],
  resolver: { nodeModulesPaths: [resolve(__dirname, "node_modules")] },
});
