/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Packets of this node's own sockets that the socket hooks leave alone, at egress. */
#pragma once

#include "lookup.h"
#include "lib/packet.h"
#include "lib/rewrite.h"
#include "tc/account_flows.h"
#include "tc/begin.h"
#include "tc/devices.h"
#include "tc/entries.h"
#include "tc/forward.h"
#include "tc/hop.h"
#include "tc/known.h"
#include "tc/scratch.h"
#include "tc/sctp.h"
#include "tc/tails.h"
#include "tc/translate.h"

/* Whether a packet that the node's own socket sends is for a Service. NodePorts need no check: they
 * are on addresses of the node, and packets to these leave by no device. */
static __always_inline bool dials_service(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (!may_be_service(&p->tuple.to))
		return false;
	service = service_at(&p->tuple.to);
	if (service)
		return (service->flags & SERVICE_CLUSTER_IP) ||
		       !is_agent_socket(bpf_get_socket_cookie(skb));
	return find_cluster_ip(&p->tuple.to.address);
}

/* Whether this packet begins a connection of the agent to which no Service applies
 * (is_agent_socket()). It may match a flow of another socket of the node that has used the same
 * port through a Service. */
static __always_inline bool is_agent_bypass(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (p->protocol != IPPROTO_TCP || !starts_flow(p) ||
	    !is_agent_socket(bpf_get_socket_cookie(skb)))
		return false;
	service = service_at(&p->tuple.to);
	return !service || !(service->flags & SERVICE_CLUSTER_IP);
}

/* Gives a new flow the address of the device that it leaves by, if that is another one than the
 * socket has chosen its address for (as MASQUERADE does, and kube-proxy with it), or of the next
 * hop's subnet: otherwise an overlay drops its packets (WireGuard's allowed networks, a reverse
 * path filter), or the replies take the underlay. Beside conntrack it gets a port of our range in
 * any case: conntrack may give the socket's own port to a client. */
static __always_inline void choose_source(struct __sk_buff *skb, struct scratch *s)
{
	struct flow *flow = &s->flow;
	struct device *to = find_next_hop(skb, &s->packet, &flow->client, &flow->backend, &s->hop,
					  true, came_in_by(skb));
	struct address own = flow->client.address;

	if (uses_conntrack())
		flow->snat = own;
	if (to) {
		if (s->hop.ifindex != skb->ifindex)
			own = s->packet.v6 ? to->snat6 : to->snat4;
		improve_source(&s->hop, &flow->backend.address, &own);
		if (!is_any(&own) && !same_address(&own, &flow->client.address))
			flow->snat = own;
	}
	s->hop.ifindex = 0; /* not cached: the route may depend on the source */
}

/* Chooses a backend for a packet of this node, sent by a socket that the hooks left alone. It
 * leaves by the device towards the backend; replies are delivered on the device that the socket
 * sends by, where they are expected. */
int tc_host_choose(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	struct client client = {};
	struct choice c = {};
	int action;

	if (!s)
		return TC_ACT_UNSPEC;
	s->owner = owner_of_packet(NULL, 0);
	if (!describe_flow(skb, s, &client, &c, &action))
		return action;
	s->flow.path = PATH_DIRECT;
	s->flow.host_device = skb->ifindex;
	choose_source(skb, s);
	return go(skb, TAIL_ENQUEUE);
}

/* Handles packets of known flows of this node's own sockets. */
int tc_host(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex), *to;
	struct scratch *s = get_scratch();
	u8 restart = RESTART_YES;
	u64 now = now_ns();
	struct translation result;
	struct packet *p;
	struct flow *flow;
	u32 flags, mtu;
	int action;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flags = p->tcp_flags | take_resumed(s); /* as in tc_ingress */
	if (!device)
		return TC_ACT_UNSPEC;
	flow = flow_between(&p->tuple);
	if (flow && flow->host_device && is_original(&p->tuple, flow) && !is_over(flow, now))
		restart = check_restart(flow, flags, now);
	if (restart)
		return starts_flow(p) ? start_flow(skb, s, restart, TAIL_HOST_CHOOSE)
				      : TC_ACT_UNSPEC;
	if (!update_flow(flow, p, flags, false, now, 0))
		return ask_judge(skb, s, TAIL_HOST);
	result.to_stack = p->tuple;
	translate_original(flow, &result);
	to = next_hop_of_flow(skb, p, &result.to_device, &flow->out, &s->hop, now);
	mtu = to ? 0 : exceeded_mtu(&s->hop);
	if (mtu)
		return send_path_mtu(skb, s, mtu < wire_length(skb, p) ? mtu : LEAST_MTU);
	if (!to)
		return drop_flow(flow, NO_ROUTE);
	account_bytes(flow, skb->len - p->l3, p->tcp_flags, false);
	if (rewrite(skb, p, &result.to_device, p->ttl))
		return drop_flow(flow, NOT_REWRITTEN);
	if (to->flags & DEVICE_NBMA) {
		action = redirect_to_remote(skb, to, &s->hop);
		if (action == TC_ACT_SHOT)
			report_flow(flow, NO_ROUTE);
		return finish_rewrite(skb, s, &result.to_device, action, p->l3);
	}
	return finish_rewrite(skb, s, &result.to_device, redirect_packet(skb, device, to, &s->hop),
			      ETH_HLEN);
}
