plugins {
    id("com.android.library") // version 9, which compiles Kotlin itself; version 8 needs kotlin("android"), too
}

android {
    namespace = "edge.moa"
    compileSdk = 35
    defaultConfig {
        minSdk = 26
        consumerProguardFiles("consumer-rules.pro")
    }
}

dependencies {
    api("org.jetbrains.kotlinx:kotlinx-coroutines-android:1.9.0")
    implementation("wang.harlon.quickjs:wrapper-android:3.2.3")
    implementation("com.squareup.okhttp3:okhttp:4.12.0")
    implementation("com.microsoft.onnxruntime:onnxruntime-android:1.22.0")
}
