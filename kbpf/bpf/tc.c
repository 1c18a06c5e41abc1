/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The packet path: translates Service addresses in packets from outside the node, and from sockets
 * of the node and its pods that the socket hooks do not serve.
 *
 * tc_ingress and tc_egress run on every host and pod device (device_roles.py); flow.h says what
 * each of them changes. Rare or long work is done by separate programs, which are reached by
 * tail calls (go() in tails.h). What one hands to the next is in the scratch buffer.
 *
 *  tc_ingress ─ parse ─ find flow ─┬─ known ─ update ─ rewrite ─► stack, next device, pod
 *      ▲▲                          ├─ known, and more than an ordinary packet ─► tc_judge ─┐
 *      │└──────────────────────────┼─────────────────────────────────────────────────────┘
 *      │                           ├─ ICMP error ─► tc_icmp_in (finds the flow of the inner packet)
 *      │                           ├─ known, but may have expired ─► tc_recheck
 *      │                           └─ may be new ─► tc_choose ─ tc_route ─ tc_enqueue ─ tc_evict ─┐
 *      │                                              ├─ no backend ─► tc_refuse                  │
 *      │                                              └─ coexisting ─► tc_coexist                 │
 *      └─────────── known now ───────────────────── tc_publish ─ tc_claim ────────────────────────┘
 *
 *  tc_egress  ─ parse ─ find flow ─┬─ known ─ (tc_judge) ─ rewrite source ─┬─► out
 *                                  │                          └─ by the wrong device ─► tc_reroute
 *                                  ├─ ICMP error ─► tc_icmp_out
 *                                  └─ sent by this node, to a Service ─► tc_host ─ tc_host_choose ─
 *                                                                        tc_enqueue ...
 *
 * With --forwarding netfilter, conntrack translates packets of other machines:
 *
 *  tc_ingress ─┬─ may be new ─ tc_choose ─ tc_conntrack ─┬─ known ─► stack, unchanged
 *              │                                         └─ new ─ tc_choose ─ tc_route ─┐
 *              │                     stack, unchanged ◄─ tc_conntrack ──────────────────┘
 *              └─ answers what has not left ─► tc_unconfirmed
 *  tc_egress  ─── the first packet of such a flow ─► tc_unconfirmed
 *
 *  tc_recheck, tc_coexist, tc_choose, tc_route, tc_delete_flow   tc/begin.h
 *  tc_conntrack, tc_unconfirmed                                  tc/conntrack.h
 *  tc_enqueue, tc_evict                                          tc/evict.h
 *  tc_claim, tc_publish                                          tc/ports.h
 *  tc_host, tc_host_choose                                       tc/host.h
 *  tc_judge                                                      tc/judge.h
 *  tc_icmp_in, tc_icmp_out                                       tc/error.h
 *  tc_refuse                                                     tc/refuse.h
 *  tc_sctp                                                       tc/sctp.h
 *  tc_end                                                        tc/account_flows.h
 *  tc_reroute                                                    tc/forward.h
 */
#include "types.h"
#include "lookup.h"
#include "lib/packet.h"
#include "lib/rewrite.h"
#include "tc/begin.h"
#include "tc/conntrack.h"
#include "tc/devices.h"
#include "tc/error.h"
#include "tc/evict.h"
#include "tc/forward.h"
#include "tc/host.h"
#include "tc/judge.h"
#include "tc/known.h"
#include "tc/ports.h"
#include "tc/receive.h"
#include "tc/refuse.h"
#include "tc/scratch.h"
#include "tc/sctp.h"
#include "tc/tails.h"
#include "tc/translate.h"

int tc_ingress(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex);
	struct translation translation = {};
	struct scratch *s = get_scratch();
	enum ingress_result result;
	struct packet *p;
	u32 flags;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flags = take_resumed(s); /* even if the device is gone: it is not for the next packet */
	if (!device || (!flags && device->bridge && passes_bridge(skb, device)))
		return TC_ACT_UNSPEC;
	if (!flags && !parse_for(skb, device, p, true, uses_conntrack()))
		return has_hidden_packet(skb) ? finish(TC_ACT_SHOT, INVALID) : TC_ACT_UNSPEC;
	if (!flags && pretends_to_be_node(skb, device, &p->tuple))
		return finish(TC_ACT_SHOT, INVALID);
	/* an ICMP error, hidden ports, or a fragment of no known flow: parse_for() */
	if (!p->tuple.from.protocol)
		return go(skb, TAIL_ICMP_IN);
	if (!flags && (skb->pkt_type != PACKET_HOST || has_source_route(skb, p)))
		return answers_refused(&p->tuple) ? judge_answer_to_refused(skb, s) : TC_ACT_UNSPEC;
	if (!flags)
		s->end = 0;
	translation.arrival = skb->ifindex;
	translation.port_of = bridge_of_port(device, skb->ifindex);
	if (device->flags & DEVICE_PEER)
		translation.pod_device = skb->ifindex;
	result = translate_in(&p->tuple, p, p->tcp_flags | flags, &translation);
	if (result == INGRESS_TRANSLATED)
		return forward_known(skb, s, device, &translation);
	if (result == INGRESS_UNJUDGED)
		return ask_judge(skb, s, TAIL_INGRESS);
	if (!flags && answers_refused(&p->tuple))
		return judge_answer_to_refused(skb, s);
	if (result == INGRESS_BRIDGED)
		return leave_to_bridge(skb);
	if (translation.masqueraded)
		mark_masqueraded(skb, true);
	/* It is of no live flow. tc_recheck decides if the flow may be over. */
	if (translation.restart == RESTART_CHECK ||
	    (starts_flow(p) && (result == INGRESS_OVER || may_begin(&p->tuple.to))))
		return start_flow(skb, s, translation.restart, TAIL_CHOOSE);
	if (starts_flow(p))
		count(NOT_A_SERVICE);
	return TC_ACT_UNSPEC;
}

int tc_egress(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex);
	bool judged, masqueraded = false;
	enum egress_result result;
	struct scratch *s;
	struct packet *p;
	struct tuple to;
	u32 flags;
	u64 nfct;

	s = get_scratch();
	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flags = take_resumed(s); /* as in tc_ingress */
	if (!device)
		return TC_ACT_UNSPEC;
	nfct = read_nfct(skb);
	if (!flags && is_first_answer(skb, s, nfct)) {
		s->begin = BEGIN_LEAVING;
		return go(skb, TAIL_UNCONFIRMED);
	}
	judged = uses_conntrack() && (nfct & NFCT_INFO) < IP_CT_ESTABLISHED_REPLY;
	if (!flags && !parse_for(skb, device, p, false, judged))
		return judge_entry(nfct);
	if (!p->tuple.from.protocol) /* an ICMP error, or hidden ports: parse_for() */
		return go(skb, TAIL_ICMP_OUT);
	if (!flags)
		s->end = 0;
	result = translate_out(&p->tuple, p, p->tcp_flags | flags, skb->len - p->l3, skb->ifindex,
			       skb->ingress_ifindex, &to, &masqueraded);
	if (result == EGRESS_UNJUDGED)
		return ask_judge(skb, s, TAIL_EGRESS);
	if (result == EGRESS_DENIED)
		return finish(TC_ACT_SHOT, INVALID);
	if (is_rewrite(result) && rewrite(skb, p, &to, p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (masqueraded)
		mark_masqueraded(skb, false);
	if (result == EGRESS_REROUTE)
		return go(skb, TAIL_REROUTE);
	if (is_rewrite(result))
		return finish_rewrite(skb, s, &to, TC_ACT_UNSPEC, p->l3);
	if (result == EGRESS_UNKNOWN && judged) {
		if (skb->priority == PRIORITY_OF_TRACKED)
			skb->priority = 0; /* IPv4: ip_forward() does so */
		if (find_unconfirmed(&p->tuple.from, &p->tuple.to)) {
			s->begin = BEGIN_LEAVING;
			return go(skb, TAIL_UNCONFIRMED);
		}
		/* With nf_conntrack_tcp_timeout_close=0 a RST has ended its own entry. */
		if (!(p->tcp_flags & TCP_RST) && judge_entry(nfct) == TC_ACT_SHOT)
			return TC_ACT_SHOT;
	}
	/* What follows is for packets of the node's own sockets, which arrived on no device. */
	if (skb->ingress_ifindex || device->role != ROLE_HOST)
		return TC_ACT_UNSPEC;
	if (result == EGRESS_HOST_FLOW && is_agent_bypass(skb, p))
		return go(skb, TAIL_DELETE_FLOW); /* its later packets must not match that flow */
	if (result == EGRESS_HOST_FLOW ||
	    (result == EGRESS_UNKNOWN && starts_flow(p) && dials_service(skb, p)))
		return go(skb, TAIL_HOST);
	return TC_ACT_UNSPEC;
}
