/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Finds the Service of a frontend, and chooses one of its backends.
 *
 * The agent never changes a set in place: it writes a new set under a new id, and then replaces the
 * one value in `services`. A reader therefore sees either the old set or the new one, as a whole.
 * Three races remain:
 *
 *  - A lookup during an update may miss the key: the kernel inserts the new element at the head of
 *    the list and then removes the old one, and a reader in between may see neither (observed on
 *    6.18: four in a million connects under constant change). service_at() looks twice, and
 *    choose() tries again before it refuses a port of a ClusterIP: six lookups in a row would have
 *    to miss. Any other address passes after two, since that is what most sockets dial.
 *
 *  - A hash element may be reused for another key as soon as it is deleted or replaced (Linux
 *    v6.1, fba1a1c6c912: without waiting for readers). read_service() detects this by the check
 *    word, which covers key and value. Only `services` has one, since its values are replaced while
 *    they are in use. Elements of `backend_slots` and `backends` are deleted after the grace
 *    period, and only that protects their readers.
 *
 *  - The old set may be deleted while a reader is between `services` and the slots. A reader needs
 *    microseconds, so this takes a machine that stalls for longer than the agent's grace period.
 *    An id is reused only after 2^31 others (ids.py), so the slot is missing rather than wrong, and
 *    choose() reads the service again.
 */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/addr.h"
#include "lib/check.h"
#include "lib/hash.h"

#define TRIES 3

/* The client, and how its packet or socket was seen. */
struct client {
	struct affinity_key key; /* for affinity; `service` is filled in later */
	u64 netns;               /* cookie; 0 for packets */
	u32 owner;               /* types.h */
	bool outside; /* neither this node nor one of its pods: the external policy applies */
	/* The struct tuple of its packet, whose sender is the key; NULL: a socket. */
	const u32 *tuple;
};

struct choice {
	struct target backend;
	u32 backend_id;
	u32 service;
	u32 flags;
	enum reason reason;
};

enum read_result {
	MISSING = 0,
	STEADY = 1,
	UNSTEADY = 2, /* replaced or deleted during the read: read again */
};

static __always_inline struct service *service_at(struct target *key)
{
	struct service *result = find_frontend(key);

	return result ? result : find_frontend(key);
}

/* Copies the service of a frontend to `out`. */
static __always_inline enum read_result read_service(struct target *key, struct service *out)
{
	struct service *now = service_at(key);

	if (!now)
		return MISSING;
	*out = *now;
	return check_of_service(key, out) == out->check ? STEADY : UNSTEADY;
}

static __always_inline u32 config_flags(void)
{
	u32 zero = 0;
	struct config *c = config.lookup(&zero);

	return c ? c->flags : 0;
}

static __always_inline bool is_host(u64 netns)
{
	u32 zero = 0;
	struct config *c = config.lookup(&zero);

	return c && c->host_netns == netns;
}

/* Whether NodePorts are served on this address for a client in this network namespace. Loopback
 * belongs to the node only in the node's own namespace. */
static __always_inline bool serves_node_ports(struct address *a, u64 netns)
{
	if (is_loopback(a) || is_any(a))
		return (config_flags() & CONFIG_LOCALHOST_NODE_PORTS) && is_host(netns);
	return find_node_address(a) != NULL;
}

/* The wildcard under which a NodePort of this address family is stored. */
static __always_inline struct target node_port_of(const struct target *to)
{
	struct target wildcard = *to;

	wildcard.address.word[3] = 0;
	if (!is_v4(&to->address)) {
		wildcard.address.word[0] = 0;
		wildcard.address.word[1] = 0;
		wildcard.address.word[2] = 0;
	}
	return wildcard;
}

/* Whether any frontend has this port. Most packets and sockets are not for a Service: for them this
 * array lookup, which the kernel inlines, replaces four hash lookups. */
static __always_inline bool is_frontend_port(__be16 port)
{
	u32 number = __builtin_bswap16(port), word = number / 64;
	u64 *bits = frontend_ports.lookup(&word);

	return bits && (*bits >> (number % 64) & 1);
}

/* Whether the destination may belong to a Service: it has the port of a frontend, or it is a
 * ClusterIP, which refuses all other ports. */
static __always_inline bool may_be_service(const struct target *to)
{
	return is_frontend_port(to->port) || find_cluster_ip(&to->address) != NULL;
}

/* Whether `to` may be served or refused: it is a frontend, has the port of a NodePort, or is a
 * ClusterIP. */
static __always_inline bool is_frontend(const struct target *to)
{
	struct target key = *to, node_port = node_port_of(to);

	return service_at(&key) || service_at(&node_port) || find_cluster_ip(&to->address);
}

/* Whether a Service is served at `to`, to clients that are not on this node. */
static __always_inline bool is_served(const struct target *to)
{
	struct target key = *to, node_port = node_port_of(to);

	return service_at(&key) || (find_node_address(&to->address) && service_at(&node_port));
}

/* Reads the service that `to` belongs to: the exact frontend, otherwise a NodePort on one of the
 * node's addresses. A client that dials 0.0.0.0 means its loopback, not the wildcard under which
 * NodePorts are stored. */
static __always_inline enum read_result find_service(const struct target *to, u64 netns,
						     struct service *out)
{
	struct target key = *to;
	enum read_result exact;

	if (!is_frontend_port(key.port))
		return MISSING;
	exact = is_any(&key.address) ? MISSING : read_service(&key, out);
	if (exact != MISSING)
		return exact;
	key = node_port_of(to);
	if (!service_at(&key)) /* no such NodePort */
		return MISSING;
	if (!serves_node_ports((struct address *)&to->address, netns))
		return MISSING;
	return read_service(&key, out);
}

/* Whether the agent uses this socket to talk to the API server. Of all frontends, only ClusterIPs
 * apply to such a socket, because the API server allocates them. Any other frontend may be an
 * address that a tenant wrote into a Service; an agent diverted by it would never learn that the
 * Service was deleted. */
static __always_inline bool is_agent_socket(u64 cookie)
{
	return agent_sockets.lookup(&cookie) != NULL;
}

/* Each unit defines its own. */
static __always_inline void count(u32 reason);

/* Whether the client's owner may have one more entry of `affinity`. Above its share it gets a
 * random backend each time, and no other owner's entry is evicted for it. CPUs that check at the
 * same time may each admit one entry too many. The key of a socket's entries is its network
 * namespace, but a container can create namespaces at will; it cannot create cgroups. */
static __always_inline bool take_share(const struct client *client)
{
	struct address owner = key_of_owner(client->owner, &client->key.client);
	u32 *share = affinity_shares.lookup(&owner);
	u32 zero = 0, one = 1;
	struct config *c = config.lookup(&zero);

	if (!share) {
		affinity_shares.update(&owner, &one);
		return true;
	}
	if (c && c->affinity_share && *share >= c->affinity_share) {
		count(NOT_RECORDED);
		return false;
	}
	__sync_fetch_and_add(share, 1);
	return true;
}

/* The backend that this client used last, if it is still in the set and the timeout has not
 * expired; otherwise 0. */
static __always_inline u32 find_affinity(const struct affinity *last, u32 set, u64 timeout, u64 now)
{
	struct member member = {.set = set};

	if (!last || elapsed(last->last_used, now) > timeout)
		return 0;
	member.backend = last->backend;
	return find_member(&member) ? member.backend : 0;
}

/* The slot for a client without affinity. A random slot is right for every set, since weights are
 * numbers of slots. For packets, the Maglev slot follows from the sender, so every node chooses the
 * same one. A socket has no port yet at connect() or sendto(), and its flow stays on this node
 * anyway. The multiplication scales 32 random bits to 0..size-1 without a division. */
static __always_inline u32 choose_slot(const struct service *service, u32 size,
				       const struct client *client)
{
	if (client->tuple && (service->flags & SERVICE_MAGLEV))
		return hash_words(client->tuple,
				  service->affinity_timeout ? CLIENT_WORDS : TUPLE_WORDS) %
		       size;
	return ((u64)bpf_get_prandom_u32() * size) >> 32;
}

/* One of the two backend sets of a service. */
struct backend_set {
	u32 id;
	u32 size;
	u32 table;
};

/* The backend id at this slot; 0 if the set or its table is gone. */
static __always_inline u32 backend_at(const struct backend_set *set, u32 index)
{
	struct slot slot = {.set = set->table};
	u32 *result;

	slot.index = index;
	if (set->table) {
		result = find_slot(&slot);
		if (!result)
			return 0;
		slot.index = *result;
	}
	slot.set = set->id;
	result = find_slot(&slot);
	return result ? *result : 0;
}

/* Chooses a backend id from the set, by affinity or by slot; 0 if the set is gone. */
static __always_inline u32 pick_backend(const struct service *service,
					const struct backend_set *set, const struct client *client,
					enum reason *reason)
{
	struct affinity_key key = client->key;
	struct affinity last = {.owner = client->owner};
	struct affinity *stored;

	*reason = TRANSLATED;
	if (!service->affinity_timeout)
		return backend_at(set, choose_slot(service, set->size, client));
	key.service = service->id;
	last.last_used = bpf_ktime_get_ns();
	stored = affinity.lookup(&key);
	last.backend = find_affinity(stored, set->id, service->affinity_timeout * 1000000000ULL,
				     last.last_used);
	if (last.backend)
		*reason = TRANSLATED_BY_AFFINITY;
	else
		last.backend = backend_at(set, choose_slot(service, set->size, client));
	if (last.backend && (stored || take_share(client)))
		affinity.update(&key, &last);
	return last.backend;
}

/* Whether only endpoints of this node may be chosen. A ClusterIP follows the internal policy, all
 * other kinds the external one. As in kube-proxy, the node and its pods get endpoints of the whole
 * cluster whatever the external policy is. */
static __always_inline bool wants_local(const struct service *service, const struct client *client)
{
	if (service->flags & SERVICE_CLUSTER_IP)
		return service->flags & SERVICE_INTERNAL_LOCAL;
	return client->outside && (service->flags & SERVICE_EXTERNAL_LOCAL);
}

/* Whether the source ranges admit this client. A socket's address is not known yet, so this is
 * false for sockets, except for those of the node that dial a NodePort. A LoadBalancer VIP has the
 * Service's loadBalancerSourceRanges. NodePorts have the node's ranges, which all Services share
 * and which are stored under service 0 (no Service has that id). */
static __always_inline bool source_allowed(const struct service *service,
					   const struct client *client)
{
	struct source_key key = {.bits = 32 + 128, .service = service->id};
	bool node_port = service->flags & SERVICE_NODE_PORT;

	if (!client->tuple)
		return node_port && is_host(client->netns);
	if (node_port)
		key.service = 0;
	key.client = client->key.client;
	return source_ranges.lookup(&key) != NULL;
}

/* One try to choose a backend for a connection to `to`; see may_be_outdated(). */
static __always_inline enum verdict choose_once(const struct target *to,
						const struct client *client, struct choice *out)
{
	struct service service = {};
	struct target *backend;
	struct backend_set set;
	enum read_result result;
	bool local;

	result = find_service(to, client->netns, &service);
	if (result == MISSING) {
		bool is_cluster_ip = find_cluster_ip(&to->address) != NULL;

		out->reason = is_cluster_ip ? UNKNOWN_PORT : NOT_A_SERVICE;
		return is_cluster_ip ? REFUSE : PASS;
	}
	if (result != STEADY) {
		out->reason = UNSTEADY_READ;
		return REFUSE;
	}
	out->service = service.id;
	out->flags = service.flags;
	if ((service.flags & SERVICE_RESTRICTED) && !source_allowed(&service, client)) {
		out->reason = client->tuple ? NOT_ALLOWED : NEEDS_SOURCE;
		return client->tuple ? DROP : PASS;
	}
	local = wants_local(&service, client);
	set.id = local ? service.local_set : service.cluster_set;
	set.size = local ? service.local_size : service.cluster_size;
	set.table = local ? service.local_table : service.cluster_table;
	if (!set.size) {
		bool elsewhere = local && (service.flags & SERVICE_ANY_ENDPOINTS);

		out->reason = elsewhere ? NO_LOCAL_ENDPOINTS : NO_ENDPOINTS;
		return elsewhere ? DROP : REFUSE;
	}
	out->backend_id = pick_backend(&service, &set, client, &out->reason);
	backend = find_backend(&out->backend_id);
	if (!out->backend_id || !backend) {
		out->reason = SET_VANISHED;
		return REFUSE;
	}
	out->backend = *backend;
	return TRANSLATE;
}

/* Whether a try may have failed only because the agent was writing, so that another may succeed. */
static __always_inline bool may_be_outdated(enum reason reason)
{
	return reason == SET_VANISHED || reason == UNSTEADY_READ || reason == UNKNOWN_PORT;
}

static __always_inline enum verdict choose(const struct target *to, const struct client *client,
					   struct choice *out)
{
	enum verdict v = REFUSE;

#pragma unroll
	for (int i = 0; i < TRIES; i++) {
		__builtin_memset(out, 0, sizeof(*out)); /* of the try before */
		v = choose_once(to, client, out);
		if (!may_be_outdated(out->reason))
			return v;
	}
	return v;
}
