// swift-tools-version: 5.9
import PackageDescription

let package = Package(
    name: "MoaEdge",
    platforms: [.iOS("18.0"), .macOS("15.0")],
    products: [.library(name: "MoaEdge", targets: ["MoaEdge"])],
    // Resources/moa-core.js is built by `npm run build` in runtime/web.
    targets: [.target(name: "MoaEdge", resources: [.copy("Resources/moa-core.js")])]
)
