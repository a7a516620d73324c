plugins {
    id("com.android.library")
    kotlin("android")
}

android {
    namespace = "edge.moa"
    compileSdk = 35
    defaultConfig { minSdk = 26 }
}

dependencies {
    implementation("wang.harlon.quickjs:wrapper-android:latest.release")
    implementation("com.squareup.okhttp3:okhttp:4.12.0")
    implementation("com.microsoft.onnxruntime:onnxruntime-android:1.22.0")
    implementation("org.jetbrains.kotlinx:kotlinx-coroutines-android:1.9.0")
}
