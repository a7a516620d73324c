package edge.moa

import android.content.BroadcastReceiver
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.net.ConnectivityManager
import android.net.Network
import android.net.NetworkCapabilities
import android.os.Handler
import android.os.PowerManager
import org.json.JSONObject

/** Watches the network and the battery, and tells changes as the request `conditions` takes them. All happens in the [handler]'s thread. */
internal class DeviceConditions(
    private val context: Context,
    private val handler: Handler,
    private val tell: (JSONObject) -> Unit,
    private val networkChanged: () -> Unit,
) : AutoCloseable {
    private val power = context.getSystemService(PowerManager::class.java)
    private val connectivity = context.getSystemService(ConnectivityManager::class.java)
    private var background = false
    private var metered = false
    private var network: Network? = connectivity.activeNetwork

    private val receiver = object : BroadcastReceiver() {
        override fun onReceive(context: Context, intent: Intent) = changed()
    }

    private val callback = object : ConnectivityManager.NetworkCallback() {
        override fun onAvailable(network: Network) {
            if (network != this@DeviceConditions.network) networkChanged() // the first call reports the present network
            this@DeviceConditions.network = network
        }

        override fun onCapabilitiesChanged(network: Network, capabilities: NetworkCapabilities) {
            metered = !capabilities.hasCapability(NetworkCapabilities.NET_CAPABILITY_NOT_METERED)
            changed()
        }
    }

    init {
        connectivity.registerDefaultNetworkCallback(callback, handler)
        context.registerReceiver(receiver, IntentFilter(PowerManager.ACTION_POWER_SAVE_MODE_CHANGED), null, handler)
        handler.post(::changed)
    }

    fun setBackground(background: Boolean) {
        handler.post {
            this.background = background
            changed()
        }
    }

    override fun close() {
        connectivity.unregisterNetworkCallback(callback)
        context.unregisterReceiver(receiver)
    }

    private fun changed() = tell(
        JSONObject().put("background", background).put("metered", metered).put("lowPower", power.isPowerSaveMode),
    )
}
